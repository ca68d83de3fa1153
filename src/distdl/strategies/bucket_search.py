"""Which bucket size is fastest here: tried on the first steps of the run itself."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

SIZES_MB = (1.0, 5.0, 25.0, 100.0)
STEPS = 6
# DDP rebuilds its buckets after the first step, and caches warm up.
NOT_COUNTED = 2


class BucketSearch:
    """Tries a few sizes, `STEPS` steps each, and settles on the one with the shortest steps.

    The size of buckets changes when gradients travel and not what they are, so the steps are
    ordinary ones of the training. As Horovod's autotuner does it (Sergeev and Del Balso 2018,
    https://arxiv.org/abs/1802.05799, section 5; `HOROVOD_AUTOTUNE`), with fewer unknowns.

    Args:
        gradient_mb: Of all gradients together (2^20 bytes): above it, sizes are alike.
        gather: Gives every rank's value on every rank, so that all of them choose alike.
        sizes_mb: What to try, besides all gradients in one bucket.
    """

    def __init__(
        self,
        gradient_mb: float,
        gather: Callable[[float], list[float]],
        sizes_mb: Sequence[float] | None = None,
    ) -> None:
        self.sizes = [size for size in sizes_mb or SIZES_MB if size < gradient_mb]
        self.sizes.append(float(int(gradient_mb) + 1))  # one bucket
        self.gather = gather
        self.seconds: dict[float, float] = {}
        self._steps: list[float] = []
        self.size = self.sizes[0]
        self.done = len(self.sizes) == 1

    def timed(self, seconds: float) -> bool:
        """Takes the time of a step; True if the next step shall have another size (`self.size`)."""
        if self.done:
            return False
        self._steps.append(seconds)
        if len(self._steps) < STEPS:
            return False
        # A step is as long as on its slowest rank.
        mine = statistics.median(self._steps[NOT_COUNTED:])
        self.seconds[self.size] = max(self.gather(mine))
        self._steps = []
        before = self.size
        if len(self.seconds) < len(self.sizes):
            self.size = self.sizes[len(self.seconds)]
        else:
            self.size = min(self.seconds, key=lambda size: self.seconds[size])
            self.done = True
        return self.size != before

    def describe(self) -> str:
        """`1 MB 41.2 ms, 5 MB 39.8 ms: 5 MB`."""
        tried = (f"{size:g} MB {1e3 * t:.1f} ms" for size, t in self.seconds.items())
        return f"{', '.join(tried)}: {self.size:g} MB"
