"""Finds the fastest bucket size during the first steps of the run itself."""

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
    """Tries a few sizes for `STEPS` steps each, then keeps the one with the shortest steps.

    The bucket size changes when gradients are sent, not their values, so the trials are ordinary
    training steps. Horovod's autotuner does the same (Sergeev and Del Balso 2018,
    https://arxiv.org/abs/1802.05799, section 5).

    Args:
        gradient_mb: Size of all gradients (2^20 bytes); larger buckets make no difference.
        gather: Returns every rank's value on every rank, so that all choose the same size.
        sizes_mb: Sizes to try, besides one bucket for all gradients.
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

    def add_step(self, seconds: float) -> bool:
        """Records the time of a step; returns whether `self.size` changes for the next step."""
        if self.done:
            return False
        self._steps.append(seconds)
        if len(self._steps) < STEPS:
            return False
        # The slowest rank determines the time of a step.
        median = statistics.median(self._steps[NOT_COUNTED:])
        self.seconds[self.size] = max(self.gather(median))
        self._steps = []
        before = self.size
        self.done = len(self.seconds) == len(self.sizes)
        fastest = min(self.seconds, key=lambda size: self.seconds[size])
        self.size = fastest if self.done else self.sizes[len(self.seconds)]
        return self.size != before

    def describe(self) -> str:
        """Times and result as text: `1 MB 41.2 ms, 5 MB 39.8 ms: 5 MB`."""
        tried = (f"{size:g} MB {1e3 * t:.1f} ms" for size, t in self.seconds.items())
        return f"{', '.join(tried)}: {self.size:g} MB"
