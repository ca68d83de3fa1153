"""The order in which an epoch reads downloaded shards, and when each shard is next needed.

The order is a pure function of (seed, epoch, sizes, window), so every rank, every resumed run and
every world size computes the same. NumPy guarantees that RandomState's numbers never change
(https://numpy.org/neps/nep-0019-rng-policy.html).
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from distdl.datasets.format import File, Split

FIRST_WINDOW = 2  # number of shards; training can start when they are cached

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Windows:
    """Shuffles the shards, and then the samples inside each window of consecutive shards.

    An epoch needs only one window of shards at a time. In epoch 0, which starts with an empty
    cache, windows start at FIRST_WINDOW shards and double up to `window`.
    """

    samples: tuple[int, ...]  # of each shard, in the order of the index
    window: int  # shards per window
    epochs: int | None = None  # how many epochs use windows before full shuffles; None: all

    def applies(self, epoch: int) -> bool:
        return self.epochs is None or epoch < self.epochs

    def shards(self, seed: int, epoch: int) -> list[Array]:
        """The shards of each window, in order."""
        shards = _random(seed, epoch, 0).permutation(len(self.samples))
        size = FIRST_WINDOW if epoch == 0 else self.window
        windows = []
        start = 0
        while start < len(shards):
            size = min(size, self.window)
            windows.append(shards[start : start + size])
            start += size
            size *= 2
        return windows

    def order(self, seed: int, epoch: int) -> Array:
        """Sample indices int64 [N], each once."""
        starts = np.cumsum((0, *self.samples))
        random = _random(seed, epoch, 1)
        parts = []
        for window in self.shards(seed, epoch):
            rows = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in window])
            parts.append(random.permutation(rows))
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    def ends(self, seed: int, epoch: int) -> list[int]:
        """Where each window ends: samples from the start of the epoch."""
        samples = np.array(self.samples, np.int64)
        return np.cumsum([samples[w].sum() for w in self.shards(seed, epoch)]).tolist()

    def next_uses(self, seed: int, epoch: int, position: int) -> Array:
        """When each shard is next needed: samples from the start of `epoch`, int64 [shards].

        `position` samples were handed out so far. Earlier windows are finished, except the one just
        before the current window: it still counts as in use, since a loader's workers lag behind.
        """
        uses = sum(self.samples) + self._starts(seed, epoch + 1)
        starts = self._starts(seed, epoch)
        current = starts[starts <= position].max(initial=0)
        previous = starts[starts < current].max(initial=0)
        return np.where(starts >= previous, starts, uses)

    def near(self, seed: int, epoch: int, position: int) -> Array:
        """The shards of the window in which `position` lies, and of the next one."""
        ends = [0, *self.ends(seed, epoch)]
        windows = [*self.shards(seed, epoch), *self.shards(seed, epoch + 1)[:1]]
        at = min(int(np.searchsorted(ends, position, side="right")), len(ends) - 1) - 1
        return np.concatenate(windows[at : at + 2])

    def _starts(self, seed: int, epoch: int) -> Array:
        """Where the window of each shard starts: samples from the start of the epoch."""
        samples = np.array(self.samples)
        starts = np.empty(len(self.samples), np.int64)
        start = 0
        for window in self.shards(seed, epoch):
            starts[window] = start
            start += samples[window].sum()
        return starts


def _random(seed: int, epoch: int, purpose: int) -> np.random.RandomState:
    parts = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch, purpose]
    return np.random.RandomState(np.array(parts, np.uint32))


def by_group(order: Array, groups: Array, size: int, ends: Sequence[int] = ()) -> Array:
    """`order`, changed so that `size` samples in a row, from the start, are of one group.

    A batch of a group takes the place of its last sample. What the groups leave over is pooled into
    mixed batches, which come last; with `ends`, at the end of each window of `order`, where fewer
    than `size` samples go over into the next one, and no further. Each sample occurs once.

    Args:
        order: Sample indices, int64 [N].
        groups: The group of each sample, a number from 0.
        size: Samples of a batch, over all ranks.
        ends: Where windows of `order` end; (): it is one window.
    """
    parts = []
    carried = order[:0]
    for start, end in pairwise([0, *ends] if ends else [0, len(order)]):
        window = np.concatenate([carried, order[start:end]])
        batches = _of_one_group(groups[window], size)
        rest = np.ones(len(window), bool)
        rest[batches] = False
        if rest[: len(carried)].any() and rest.sum() < size and len(batches):
            # They would wait for one more window: the last batch of a group goes into the pool.
            rest[batches[-1]] = True
            batches = batches[:-1]
        pooled = window[rest]
        whole = len(pooled) // size * size
        parts += [window[batches.reshape(-1)], pooled[:whole]]
        carried = pooled[whole:]
    return np.concatenate([*parts, carried])


def _of_one_group(groups: Array, size: int) -> Array:
    """Batches of one group, in the order of their last samples: places in `groups`, [B, size]."""
    batches = [np.empty((0, size), np.int64)]
    for group in np.unique(groups):
        places = np.flatnonzero(groups == group)
        batches.append(places[: len(places) // size * size].reshape(-1, size))
    full = np.concatenate(batches)
    return full[np.argsort(full[:, -1])]


def by_first_use(shard_of: Array, order: Array) -> Array:
    """Shards, sorted by their first use in `order`.

    `shard_of` is the shard of each sample, `order` has sample indices.
    """
    shards, first = np.unique(shard_of[order], return_index=True)
    return shards[np.argsort(first)]


class Needs:
    """Sorts shards by their next use. It shares a rank's progress with the loader's workers.

    Create it before the workers: they share its memory. Training reads `train` in the order of
    `windows`, and after each epoch `val` in the order of its shards.
    """

    def __init__(self, windows: Windows, train: Split, val: Split | None = None) -> None:
        self.windows = windows
        self._files: list[File] = [*train.shards, *(val.shards if val else ())]
        self._number = {file.name: number for number, file in enumerate(self._files)}
        self._samples = train.samples
        samples = [shard.samples for shard in val.shards] if val else []
        self._val = train.samples + np.cumsum([0, *samples], dtype=np.int64)[: len(samples)]
        # Seed, epoch, samples handed out in it.
        self._now = multiprocessing.RawArray(ctypes.c_int64, [0, 0, 0])

    def reached(self, seed: int, epoch: int, position: int) -> None:
        self._now[:] = [seed, epoch, position]

    def soonest_first(self) -> Sequence[File]:
        """All shards, sorted by their next use."""
        return [self._files[i] for i in np.argsort(self._uses(), kind="stable")]

    def soonest_used(self, train: int, val: int) -> Sequence[File]:
        """Like `soonest_first`, but only shards with the first `train` and `val` samples."""
        uses = self._uses()
        shards = len(self._files) - len(self._val)
        used = uses < self._samples + val
        used[:shards] = (train == self._samples) | (uses[:shards] < train)
        return [self._files[i] for i in np.argsort(uses, kind="stable") if used[i]]

    def near(self) -> Sequence[File]:
        """The shards of training that are read now, and those that are read next."""
        return [self._files[i] for i in self.windows.near(*self._now)]

    def farthest_first(self, file: File) -> Sequence[str]:
        """All shards except `file`, which is needed now; the farthest next use comes first."""
        return [other.name for other in reversed(self.soonest_first()) if other.name != file.name]

    def needed_later(self, file: File) -> Sequence[str]:
        """Like `farthest_first`, but only shards that are needed later than `file`."""
        uses = self._uses()
        use = uses[self._number[file.name]]
        return [self._files[i].name for i in np.argsort(-uses) if uses[i] > use]

    def _uses(self) -> Array:
        seed, epoch, position = self._now
        return np.concatenate([self.windows.next_uses(seed, epoch, position), self._val])
