"""Base of data modules of stored samples, of any domain: folders, shards, shards in a store."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from distdl.data import stored_checks
from distdl.data.encoded import EncodedData, OnDamaged
from distdl.data.images import ImageData, WorkerKind
from distdl.data.roots import cache_root, expanded, is_listed, is_prepared
from distdl.data.same_data import name_different_decoders, refuse_different_data
from distdl.data.shard_reading import Order, ShardReading
from distdl.data.shards import ShardSamples, TrainOrder
from distdl.data.stored_form import StoredForm
from distdl.datasets.left_out import LeftOut
from distdl.datasets.reading import open_data_set
from distdl.images.augment import IMAGENET_MEAN, IMAGENET_STD
from distdl.stores.files import readable
from distdl.util.errors import Problem, UserError

log = logging.getLogger(__name__)


class StoredData(StoredForm, ImageData):
    """Samples in a folder of a form of their domain, or prepared: a folder of shards that is read
    in place, or the URI of one, of which each shard is downloaded once per node into `cache_dir`.

    A subclass names its `domain`, and says how its domain's folders are checked and opened
    (`StoredForm`). Predictions are of the validation split. For them `root` may also be a folder or
    a URI of images without splits (`open_listed`).

    Args:
        root: Where the samples are.
        batch_size: Samples per device.
        node: The keys of the data node that the domain's views take, and those that `check_folder`
            and `misfits` look at.
        num_workers: Processes that decode; None: this rank's share of the cores, less one or two.
        mean, std: As for `ImageData`.
        on_damaged: "skip" or "error", for a sample that cannot be decoded.
        cache_dir: Where shards of a URI are cached; None: `datasets.cache.default_root`. If set,
            shards of a local `root`, such as a slow mount, are copied there, too.
        cache_gb: Size limit of `cache_dir`, in 10**9 bytes; None: limited by the disk. If it is
            less than the data set, shards are evicted and every epoch is shuffled in windows.
        shuffle_window: Shards per window, for epochs that are shuffled in windows. Reduced if
            three windows would not fit `cache_gb`.
        worker_kind: As for `ImageData`.
        order: "shuffled": in each epoch all samples (the first of a URI is shuffled in windows);
            "windows": every epoch is, for a storage that is slow at random, and shards in a folder
            are read ahead, in order; "auto": what `distdl.data.reading_order` has chosen before a
            training starts, else "shuffled".

    Raises:
        UserError: In setup, if there is no data, it does not fit, or the cache has no room.
    """

    def __init__(
        self,
        root: str,
        batch_size: int,
        node: Mapping[str, Any],
        *,
        num_workers: int | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        on_damaged: OnDamaged = "skip",
        cache_dir: str | None = None,
        cache_gb: float | None = None,
        shuffle_window: int = 32,
        worker_kind: WorkerKind = "auto",
        order: Order = "shuffled",
    ) -> None:
        super().__init__(batch_size, num_workers, mean, std, on_damaged, worker_kind)
        self.root = expanded(root)
        self.node = node
        self.cache_dir = cache_dir
        self.cache_gb = cache_gb
        self.shuffle_window = shuffle_window
        self.order = order
        self.train_view, self.val_view = self.domain.views(node)
        self.splits: dict[str, EncodedData] = {}
        self._order: TrainOrder | None = None

    @property
    def digest(self) -> str:
        """Identifies what is opened, by its manifest or its files; "" before that."""
        return "-".join(dict.fromkeys(samples.key[:12] for samples in self.splits.values()))

    @classmethod
    def check(
        cls, config: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> Iterable[Problem | str]:
        """Problems of a data node, and notes: `stored_checks.check`."""
        return stored_checks.check(cls, config, context)

    def setup(self, stage: str | None = None) -> None:
        if self.splits:
            return
        name_different_decoders(getattr(self.val_view, "decoded_by", ""))
        self.open(stage)

    def open(self, stage: str | None) -> None:
        """Opens `splits`. Raises as `setup` does."""
        left_out = LeftOut()
        with readable("data.root"):
            if stage == "predict" and self.reads_listed and is_listed(self.root):
                listed = self.open_listed()
                self.splits["val"] = listed
                return self._say(listed.left_out)
            prepared = is_prepared(self.root)
            if not prepared:
                _refuse(stored_checks.without_windows(self.root, self.order))
                _refuse(self.check_folder(Path(self.root), self.node))
                splits = self.open_folder(Path(self.root), left_out)
        if prepared:
            return self._open_shards()
        refuse_different_data("-".join(samples.key[:12] for samples in splits.values()))
        self._say(left_out)
        self.splits.update(splits)

    def _say(self, left_out: LeftOut) -> None:
        """Names what is left out of the data, once."""
        if self.trainer is None or self.trainer.global_rank == 0:
            for line in left_out.lines():
                log.warning("data: %s", line)

    def _open_shards(self) -> None:
        data = open_data_set(self.root, cache_root=cache_root(self.cache_dir))
        refuse_different_data(data.key[:12])
        _refuse(self.misfits(data, self.node))
        reading = ShardReading(
            self.root,
            self.cache_dir,
            self.cache_gb,
            self.shuffle_window,
            self.order,
            is_first=self.trainer is None or self.trainer.local_rank == 0,
            speaks=self.trainer is None or self.trainer.global_rank == 0,
        )
        held = {name: split for name, split in data.manifest.splits.items() if split.samples}
        wanted = self.wanted(held)
        if {"train", "val"} <= held.keys():
            shards, order = reading.open_to_train(data, wanted, self._used)
            self._order = order
            train = shards.pop("train")
            self.splits["train"] = ShardSamples(self.domain, self.train_view, train, order)
        else:
            shards = reading.open_to_predict(data, wanted)
        for name, each in shards.items():
            self.splits[name] = ShardSamples(self.domain, self.val_view, each)
        self.opened_shards(data)

    def _used(self) -> tuple[int, int]:
        """How many samples of an epoch, and of the validation after it, are used at most.

        These are the first ones, by `trainer.limit_train_batches` and `limit_val_batches`. It is an
        upper bound: a global batch may be smaller than `batch_size * world_size`.
        """
        trainer = self.trainer

        def used(split: str, limit: float) -> int:
            size = len(self.splits[split])
            if trainer is not None and isinstance(limit, int):
                return min(size, limit * self.batch_size * trainer.world_size)
            return math.ceil(size * limit)

        limits = (trainer.limit_train_batches, trainer.limit_val_batches) if trainer else (1.0, 1.0)
        return used("train", limits[0]), used("val", limits[1])

    def teardown(self, stage: str | None = None) -> None:
        if self._order is not None:
            self._order.close()

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.splits["train"], shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.splits["val"], shuffle=False)

    def predict_dataloader(self) -> DataLoader[Any]:
        images = copy.copy(self.splits["val"])
        images.replaces = False
        return self.loader(images, shuffle=False)


def _refuse(problems: Iterable[Problem]) -> None:
    listed = [replace(p, path=f"data.{p.path}") for p in problems]
    if listed:
        raise UserError(*listed)
