"""Opens a prepared data set: its shards in place or by way of a cache, their order and prefetch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distdl.data.roots import cache_root
from distdl.data.shards import TrainOrder
from distdl.datasets.cache import REMEDY, Cache
from distdl.datasets.format import Manifest
from distdl.datasets.order import Needs, Windows
from distdl.datasets.prefetch import Prefetch
from distdl.datasets.read_ahead import PageCache
from distdl.datasets.reading import DataSet, Shards
from distdl.stores import is_remote, open_store
from distdl.util.errors import UserError
from distdl.util.progress_bar import size

log = logging.getLogger(__name__)

Order = Literal["auto", "shuffled", "windows"]
GB = 10**9


@dataclass(frozen=True)
class ShardReading:
    """How the shards of a data set are read.

    Args:
        root: The folder or URI of the set.
        cache_dir, cache_gb, shuffle_window, order: As for `StoredData`.
        is_first: Whether this rank is the first one of its node, which fetches for all.
        speaks: Whether this rank says what it opens.
    """

    root: str
    cache_dir: str | None
    cache_gb: float | None
    shuffle_window: int
    order: Order
    is_first: bool
    speaks: bool

    @property
    def in_place(self) -> bool:
        return not is_remote(self.root) and self.cache_dir is None

    @property
    def limit(self) -> int | None:
        """Bytes that the cache may hold."""
        return None if self.cache_gb is None else int(self.cache_gb * GB)

    def fits(self, data: DataSet) -> bool:
        """Whether all shards may be kept at once."""
        return self.in_place or self.limit is None or data.bytes <= self.limit

    def open_to_train(
        self, data: DataSet, splits: Sequence[str], used: Callable[[], tuple[int, int]]
    ) -> tuple[dict[str, Shards], TrainOrder]:
        """The shards of some splits, "train" and "val" among them, and the order of the training.

        Args:
            used: As for `TrainOrder`.
        """
        fits = self.fits(data)
        cache = None if self.in_place else self._cache(data)
        window = self.shuffle_window
        epochs: int | None = 0 if self.in_place else 1
        if self.order == "windows":
            epochs = None
        if self.limit is not None and not fits:
            window = min(window, _most_shards(data.manifest, self.limit))
            epochs = None
        train, val = data.split("train"), data.split("val")
        samples = tuple(shard.samples for shard in train.shards)
        needs = Needs(Windows(samples, window, epochs), train, val)
        evictable = None if fits else needs.farthest_first
        shards = {name: Shards(data, name, cache, evictable) for name in splits}
        prefetch = None
        if cache is not None and self.is_first:
            if is_remote(self.root) and not data.note:
                data.keep(cache.root)
            its_cache = Cache(open_store(self.root), cache.root, data.key, self.limit)
            prefetch = Prefetch(its_cache, None if fits else needs.needed_later)
        ahead = None
        if self.in_place and epochs is None and self.is_first:
            ahead = PageCache(Path(self.root))
            prefetch = Prefetch(ahead, lambda file: ())
        order = TrainOrder(needs, shards["train"], shards["val"], prefetch, used, ahead)
        return shards, order

    def open_to_predict(self, data: DataSet, splits: Sequence[str]) -> dict[str, Shards]:
        """Of a set that cannot be trained on: each shard is fetched when it is read."""
        cache = None if self.in_place else self._cache(data)
        if not self.fits(data):
            raise UserError.at(
                "data.cache_gb",
                what=f"is less than the {data.bytes / GB:.3g} GB of a set without training samples",
                remedy="data.cache_gb=null",
                code="not-enough",
            )
        return {name: Shards(data, name, cache, None) for name in splits}

    def _cache(self, data: DataSet) -> Cache:
        root = cache_root(self.cache_dir)
        cache = Cache(data.store, root, data.key, self.limit)
        wanted = data.bytes if self.limit is None else min(self.limit, data.bytes)
        room = cache.room()
        if room < wanted:
            raise UserError.at(
                "data.cache_dir",
                what=f"{root} has room for {room / GB:.3g} GB; the data needs {wanted / GB:.3g} GB",
                remedy=REMEDY,
                code="not-enough",
            )
        if self.speaks:
            if data.note:
                log.warning(data.note)
            shards = [s for split in data.manifest.splits.values() for s in split.shards]
            log.info(
                "data: %s, %s in %d shards, of which %d are in %s",
                data.store.uri,
                size(data.bytes),
                len(shards),
                sum(map(cache.has, shards)),
                cache.folder,
            )
        return cache


def _most_shards(manifest: Manifest, limit: int) -> int:
    """How many shards a window may have so that the previous, the current and the next one fit."""
    largest = max(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    indices = sum(split.index.bytes for split in manifest.splits.values())
    most = (limit - indices) // (3 * largest)
    if most < 1:
        raise UserError.at(
            "data.cache_gb",
            what="is too small for three shards",
            remedy=(
                f"data.cache_gb={math.ceil((3 * largest + indices) / GB * 1000) / 1000:g} or more"
            ),
            code="not-enough",
        )
    return most
