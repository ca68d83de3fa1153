"""Samples in shards: their order and their prefetch."""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np

from distdl.data.encoded import EncodedData
from distdl.datasets.image_headers import DamagedImage
from distdl.datasets.order import Needs, by_first_use
from distdl.datasets.prefetch import Prefetch
from distdl.datasets.read_ahead import PageCache
from distdl.datasets.reading import Shards
from distdl.domains.domain import Domain, View
from distdl.domains.record import Annotation


class ShardSamples(EncodedData):
    """The samples of a split in shards, of any domain; only the training split has an `order`."""

    def __init__(
        self, domain: Domain, view: View, shards: Shards, order: TrainOrder | None = None
    ) -> None:
        super().__init__(view)
        self.domain = domain
        self.shards = shards
        self._order = order
        self.classes = shards.classes
        self.key = shards.key
        self.folder = shards.folder
        # Which samples were decoded to their end: shared with a loader's workers, as the bytes are
        # always those that were prepared.
        self._whole = multiprocessing.RawArray(ctypes.c_uint8, len(shards))

    def __len__(self) -> int:
        return len(self.shards)

    def read(self, index: int) -> bytes:
        try:
            return self.shards.read(index)
        except ValueError as error:
            raise DamagedImage(str(error)) from error

    def annotation(self, index: int) -> Annotation:
        record = self.domain.record
        annotation = record.in_index(int(self.shards.rows["label"][index]))
        if annotation is not None:
            return annotation
        try:
            return record.decode(self.shards.record(index))
        except ValueError as error:
            raise DamagedImage(f"its record: {error}") from error

    def name(self, index: int) -> str:
        return self.shards.member(index)

    def repair(self, index: int) -> bool:
        return self.shards.repair(index)

    def known_whole(self, index: int) -> bool:
        return bool(self._whole[index])

    def found_whole(self, index: int) -> None:
        self._whole[index] = 1

    def for_thread(self, threads: int) -> ShardSamples:
        samples = copy.copy(self)
        samples.shards = self.shards.for_thread(threads)
        return samples

    # The methods of `distdl.data.sampling.Ordered`.
    def order(self, seed: int, epoch: int) -> np.ndarray | None:
        return self._order.order(seed, epoch) if self._order else None

    def ends(self, seed: int, epoch: int) -> list[int]:
        """Where windows of an epoch's order end, for `sampling.Groups`; []: it has none."""
        return self._order.ends(seed, epoch) if self._order else []

    def reached(self, seed: int, epoch: int, start: int, order: np.ndarray) -> None:
        if self._order:
            self._order.reached(seed, epoch, start, order)


class TrainOrder:
    """The order in which training reads shards, and their prefetch.

    Args:
        shards, val: Of training, and of validation, which follows each epoch of training.
        prefetch: None if nothing is prefetched, or if another rank of this node does it.
        ahead: What `prefetch` fills if shards are read in place.
        used: Returns how many samples of an epoch, and of validation, will be used.
    """

    def __init__(
        self,
        needs: Needs,
        shards: Shards,
        val: Shards,
        prefetch: Prefetch | None,
        used: Callable[[], tuple[int, int]],
        ahead: PageCache | None = None,
    ) -> None:
        self._needs = needs
        self._shards = shards
        self._val = val
        self._prefetch = prefetch
        self._used = used
        self._ahead = ahead
        self._epoch: tuple[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        unused = dict.fromkeys(("_prefetch", "_used", "_ahead"))  # by workers
        return {**self.__dict__, **unused}

    def order(self, seed: int, epoch: int) -> np.ndarray | None:
        """Sample indices int64 [N]; None: a plain shuffle of all."""
        windows = self._needs.windows
        return windows.order(seed, epoch) if windows.applies(epoch) else None

    def ends(self, seed: int, epoch: int) -> list[int]:
        windows = self._needs.windows
        return windows.ends(seed, epoch) if windows.applies(epoch) else []

    def reached(self, seed: int, epoch: int, start: int, order: np.ndarray) -> None:
        self._needs.reached(seed, epoch, start)
        if self._prefetch is None or self._epoch == (seed, epoch):
            return
        self._epoch = (seed, epoch)
        if ahead := self._ahead:
            self._prefetch.want(lambda: ahead.only(self._needs.near()))
            return
        train, val = self._used()
        if self._needs.windows.epochs is None:  # the cache cannot hold all
            self._prefetch.want(lambda: self._needs.soonest_used(train, val))
            return
        shards = self._shards.split.shards
        numbers = by_first_use(self._shards.rows["shard"], order[start:train]).tolist()
        files = [shards[number] for number in numbers]
        if train == len(order):  # the next epoch reads all shards
            files += shards
        if val:
            files += self._val.split.shards[: self._val.rows["shard"][val - 1] + 1]
        self._prefetch.want(lambda: files)

    def fetch_all(self) -> None:
        """Fetches all shards of training, in their order, if nothing says when they are needed."""
        if self._prefetch is not None and self._ahead is None:
            self._prefetch.want(lambda: self._shards.split.shards)

    def close(self) -> None:
        if self._prefetch is not None:
            self._prefetch.close()
