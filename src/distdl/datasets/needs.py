"""When each shard is next needed, if the data set is larger than the cache."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Sequence

import numpy as np

from distdl.datasets.format import File, Split
from distdl.datasets.order import Windows


class Needs:
    """Sorts shards by their next use. It shares a rank's progress with the loader's workers.

    Create it before the workers: they share its memory. Training reads `train` in the order of
    `windows`, and after each epoch `val` in the order of its shards.
    """

    def __init__(self, windows: Windows, train: Split, val: Split | None = None) -> None:
        self.windows = windows
        self._files: list[File] = [*train.shards, *(val.shards if val else ())]
        self._place = {file.name: place for place, file in enumerate(self._files)}
        self._samples = train.samples
        samples = [shard.samples for shard in val.shards] if val else []
        self._val = train.samples + np.cumsum([0, *samples], dtype=np.int64)[: len(samples)]
        # Seed, epoch, samples handed out in it.
        self._now = multiprocessing.RawArray(ctypes.c_int64, [0, 0, 0])

    def reached(self, seed: int, epoch: int, place: int) -> None:
        self._now[:] = [seed, epoch, place]

    def soonest_first(self) -> Sequence[File]:
        """All shards, sorted by their next use."""
        return [self._files[i] for i in np.argsort(self._uses(), kind="stable")]

    def soonest_used(self, train: int, val: int) -> Sequence[File]:
        """Like `soonest_first`, but only shards with the first `train` and `val` samples."""
        uses, shards = self._uses(), len(self._files) - len(self._val)
        used = uses < self._samples + val
        used[:shards] = (train == self._samples) | (uses[:shards] < train)
        return [self._files[i] for i in np.argsort(uses, kind="stable") if used[i]]

    def farthest_first(self, file: File) -> Sequence[str]:
        """All shards except `file`, which is needed now; the farthest next use comes first."""
        return [other.name for other in reversed(self.soonest_first()) if other.name != file.name]

    def needed_later(self, file: File) -> Sequence[str]:
        """Like `farthest_first`, but only shards that are needed later than `file`."""
        uses = self._uses()
        use = uses[self._place[file.name]]
        return [self._files[i].name for i in np.argsort(-uses) if uses[i] > use]

    def _uses(self) -> np.ndarray:
        seed, epoch, place = self._now
        return np.concatenate([self.windows.next_uses(seed, epoch, place), self._val])
