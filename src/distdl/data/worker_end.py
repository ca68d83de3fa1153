"""Ends a loader's workers with their rank, however that ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from distdl.util.orphans import die_with_parent


@dataclass
class EndingWithRank:
    """A `worker_init_fn` for DataLoader that wraps the user's own. Until then a worker outlives the
    signals that end a job (`distdl.util.helpers`)."""

    then: Callable[[int], None] | None = None

    def __call__(self, worker_id: int) -> None:
        die_with_parent()  # torch's own check waits for the end of the sample
        if self.then is not None:
            self.then(worker_id)
