"""A loader's workers outlive the signals that end a job, so that the job can end in order."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

PATIENCE = 60  # seconds a worker stays after a SIGTERM; its rank ends it long before


@dataclass
class Surviving:
    """A `worker_init_fn` for DataLoader, around the user's own.

    Slurm, Azure ML and `timeout` signal every process of a job. A worker that died of it would
    take its rank down in the middle of a step, before the checkpoint is written. DataLoader itself
    ends its workers by a message; only one that hangs is terminated, and then the alarm ends it.
    """

    then: Callable[[int], None] | None = None

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGTERM, _stay)
        for number in (signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker_id)


def _stay(number: int, frame: FrameType | None) -> None:
    signal.alarm(PATIENCE)
