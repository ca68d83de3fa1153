"""Ends a loader's workers with their rank, however that ends, and their rank's step with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any

from torch._utils import ExceptionWrapper

from distdl.util.orphans import die_with_parent


@dataclass
class EndingWithRank:
    """A `worker_init_fn` for DataLoader that wraps the user's own. Until then a worker outlives the
    signals that end a job (`distdl.util.helpers`)."""

    then: Callable[[int], None] | None = None

    def __call__(self, worker_id: int) -> None:
        die_with_parent()  # torch's own check waits for the end of the sample
        send_failures(worker_id)
        if self.then is not None:
            self.then(worker_id)


def send_failures(worker: int) -> None:
    """Makes a batch that this worker cannot send fail its rank. A thread of the queue sends it, and
    by default only prints the error; the rank would wait for the batch for ever."""
    printed = Queue._on_queue_feeder_error  # type: ignore[attr-defined]

    def send(queue: Queue[Any], error: Exception, sent: object) -> None:
        number, batch = sent if isinstance(sent, tuple) and len(sent) == 2 else (None, None)
        if not isinstance(number, int) or isinstance(batch, ExceptionWrapper):
            printed(error, sent)  # not a batch
            return
        facts = (type(error), error, error.__traceback__)
        where = f"in DataLoader worker process {worker}, which could not send a batch"
        queue.put((number, ExceptionWrapper(facts, where)))

    name = "_on_queue_feeder_error"
    setattr(Queue, name, send)
