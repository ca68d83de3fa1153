"""Base of data modules of stored samples, of any domain: folders, shards, shards in a store."""

from __future__ import annotations

import copy
import logging
import math
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader

from distdl.config import epochs, task_facts
from distdl.data.encoded import EncodedData, OnDamaged
from distdl.data.images import ImageData, WorkerKind
from distdl.data.listed import ListedImages
from distdl.data.shards import ShardSamples, TrainOrder
from distdl.datasets.cache import REMEDY, Cache
from distdl.datasets.format import MANIFEST, Manifest
from distdl.datasets.left_out import LeftOut
from distdl.datasets.order import Needs, Windows
from distdl.datasets.prefetch import Prefetch
from distdl.datasets.read_ahead import PageCache
from distdl.datasets.reading import DataSet, Shards, open_data_set
from distdl.distributed import process_group
from distdl.domains.domain import Domain
from distdl.images.augment import IMAGENET_MEAN, IMAGENET_STD
from distdl.stores import PATIENCE, is_remote, open_store
from distdl.stores.files import readable
from distdl.util.cache_folder import default_root
from distdl.util.errors import Problem, UserError
from distdl.util.progress_bar import size
from distdl.util.wording import first_few

log = logging.getLogger(__name__)

Order = Literal["auto", "shuffled", "windows"]
GB = 10**9
QUICK = 5.0  # seconds that a check waits for a server


class StoredData(ImageData):
    """Samples in a folder of a form of their domain, or prepared: a folder of shards that is read
    in place, or the URI of one, of which each shard is downloaded once per node into `cache_dir`.

    A subclass names its `domain`, and says how its domain's folders are checked and opened.
    Predictions are of the validation split. For them `root` may also be a folder or a URI of images
    without splits (`open_listed`).

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

    domain: Domain
    # Whether `open_listed` can predict a folder of images alone.
    reads_listed = False

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

    # What a domain's data module says.

    @classmethod
    def check_folder(cls, root: Path, node: Mapping[str, Any]) -> Iterable[Problem]:
        """Problems of a folder that is not prepared; paths are relative to the data node."""
        remedy = "python -m distdl prepare ... makes a prepared data set"
        yield Problem("root", f"{root} has no {MANIFEST}", remedy, code="incomplete")

    @classmethod
    def count_folder(cls, root: Path, node: Mapping[str, Any]) -> int:
        """How many training samples a folder has in which `check_folder` finds no problem."""
        raise NotImplementedError

    @classmethod
    def count_up_to(cls, root: Path, node: Mapping[str, Any], enough: int) -> int:
        """As `count_folder`, but it may end where there are `enough` samples."""
        return cls.count_folder(root, node)

    @classmethod
    def _check_epoch(
        cls, root: Path, node: Mapping[str, Any], context: Mapping[str, Any] | None
    ) -> Iterable[Problem]:
        """What does not fit the samples of a folder. To list a large one takes seconds, so it is
        listed no further than the check needs."""
        config = (context or {}).get("config")
        sizes = epochs.batch_sizes(config, (context or {}).get("world_size", 1)) if config else None
        if sizes is None:
            return
        added = cls.added(node)
        if _counts_batches(context):
            yield from _of_epoch(context, cls.count_folder(root, node) + added)
            return
        batch, shares = sizes
        count = cls.count_up_to(root, node, batch * shares) + added
        if count < batch * shares:
            yield from _of_epoch(context, count)

    def open_folder(self, root: Path, left_out: LeftOut) -> Mapping[str, EncodedData]:
        """The splits "train" and "val" of such a folder; what is no sample is added to `left_out`.

        Raises:
            UserError: It holds no samples, or samples that are ambiguous.
            OSError: It cannot be read.
        """
        raise NotImplementedError

    def open_listed(self) -> ListedImages:
        """The images below `root`, to predict: neither prepared nor divided into splits."""
        raise NotImplementedError

    @classmethod
    def added(cls, node: Mapping[str, Any]) -> int:
        """How many training samples an epoch has beside those of `root`."""
        return 0

    @classmethod
    def required(cls, node: Mapping[str, Any]) -> Sequence[str]:
        """The splits that a prepared data set must have."""
        return ("train", "val")

    def wanted(self, splits: Mapping[str, object]) -> list[str]:
        """Those of a data set's splits that are opened; training and validation are among them."""
        return ["train", "val"]

    def opened_shards(self, data: DataSet) -> None:
        """Called when `splits` are those of a prepared data set."""

    @classmethod
    def misfits(cls, data: DataSet, node: Mapping[str, Any]) -> Iterable[Problem]:
        """How a prepared data set differs from the data node; paths are relative to the node."""
        splits = data.manifest.splits
        uri = data.store.uri
        if data.manifest.domain != cls.domain.name:
            what = f"{uri} was prepared for {data.manifest.domain}, not for {cls.domain.name}"
            yield Problem(
                "root",
                what,
                "choose data and model of that domain, or another root",
                code="mismatch",
            )
            return
        for split in sorted({*cls.required(node)} - splits.keys()):
            what = f"{uri} has no {split!r}"
            yield Problem("root", what, f"it has {[*splits]}", code="incomplete")
        for name in [name for name in cls.required(node) if not splits[name].samples]:
            remedy = "python -m distdl prepare ... makes both splits (docs/data/prepare.md)"
            yield Problem("root", f"{uri} has no sample in {name!r}", remedy, code="incomplete")

    @classmethod
    def check(
        cls, config: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> Iterable[Problem | str]:
        """Problems of a data node, with paths relative to it, and notes (str) for the user. Files
        and servers are checked only for a local run: a remote job may see other ones.

        Args:
            context: {"local": whether the run is on this machine}; None: it is.
        """
        local = context is None or bool(context["local"])
        yield from cls.domain.check(config, local=local)
        predicts = "predict_dataloader" in task_facts.of((context or {}).get("config", {})).calls
        if not local:
            yield f"the job itself checks {str(config['root']).partition('?')[0]}"  # no signature
            return
        try:
            root = expanded(str(config["root"]))
            with readable("root"):
                if predicts and cls.reads_listed and _is_listed(root, QUICK):
                    return
                if not is_prepared(root):
                    yield from _without_windows(root, config.get("order"))
                    found = [*cls.check_folder(Path(root), config)]
                    yield from found or cls._check_epoch(Path(root), config, context)
                    return
            data = open_data_set(
                root, patience=QUICK, cache_root=_cache_root(config.get("cache_dir"))
            )
            if data.note:
                yield data.note
            found = [*cls.misfits(data, config)]
            yield from found
            if not found and "train" in data.manifest.splits:
                count = data.manifest.splits["train"].samples + cls.added(config)
                yield from _of_epoch(context, count)
        except UserError as error:
            yield from (replace(p, path="root") for p in error.problems)

    def setup(self, stage: str | None = None) -> None:
        if self.splits:
            return
        name_different_decoders(getattr(self.val_view, "decoded_by", ""))
        self.open(stage)

    def open(self, stage: str | None) -> None:
        """Opens `splits`. Raises as `setup` does."""
        left_out = LeftOut()
        with readable("data.root"):
            if stage == "predict" and self.reads_listed and _is_listed(self.root):
                listed = self.open_listed()
                self.splits["val"] = listed
                return self._say(listed.left_out)
            prepared = is_prepared(self.root)
            if not prepared:
                _refuse(_without_windows(self.root, self.order))
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
        cache_root = _cache_root(self.cache_dir)
        data = open_data_set(self.root, cache_root=cache_root)
        refuse_different_data(data.key[:12])
        _refuse(self.misfits(data, self.node))
        in_place = not is_remote(self.root) and self.cache_dir is None
        limit = None if self.cache_gb is None else int(self.cache_gb * GB)
        fits = in_place or limit is None or data.bytes <= limit
        cache = None if in_place else self._cache(data, cache_root, limit)
        held = {name: split for name, split in data.manifest.splits.items() if split.samples}
        if not {"train", "val"} <= held.keys():
            return self._open_predicted(data, self.wanted(held), cache, fits)
        window: int = self.shuffle_window
        epochs: int | None = 0 if in_place else 1
        if self.order == "windows":
            epochs = None
        if limit is not None and not fits:
            window = min(window, _most_shards(data.manifest, limit))
            epochs = None
        train, val = data.split("train"), data.split("val")
        samples = tuple(shard.samples for shard in train.shards)
        needs = Needs(Windows(samples, window, epochs), train, val)
        evictable = None if fits else needs.farthest_first
        shards = {name: Shards(data, name, cache, evictable) for name in self.wanted(held)}
        prefetch = None
        if cache is not None and (self.trainer is None or self.trainer.local_rank == 0):
            if is_remote(self.root) and not data.note:
                data.keep(cache.root)
            its_cache = Cache(open_store(self.root), cache.root, data.key, limit)
            prefetch = Prefetch(its_cache, None if fits else needs.needed_later)
        ahead = None
        if in_place and epochs is None and (self.trainer is None or self.trainer.local_rank == 0):
            ahead = PageCache(Path(self.root))
            prefetch = Prefetch(ahead, lambda file: ())
        train_shards, val_shards = shards["train"], shards["val"]
        order = TrainOrder(needs, train_shards, val_shards, prefetch, self._used, ahead)
        self._order = order
        domain = self.domain
        self.splits["train"] = ShardSamples(domain, self.train_view, train_shards, order)
        for name in [name for name in shards if name != "train"]:
            self.splits[name] = ShardSamples(domain, self.val_view, shards[name])
        self.opened_shards(data)

    def _open_predicted(
        self, data: DataSet, wanted: Sequence[str], cache: Cache | None, fits: bool
    ) -> None:
        """Of a set that cannot be trained on: each shard is fetched when it is read."""
        if not fits:
            what = f"is less than the {data.bytes / GB:.3g} GB of a set without training samples"
            raise UserError.at("data.cache_gb", what, "data.cache_gb=null", code="not-enough")
        for name in wanted:
            shards = Shards(data, name, cache, None)
            self.splits[name] = ShardSamples(self.domain, self.val_view, shards)
        self.opened_shards(data)

    def _cache(self, data: DataSet, root: Path, limit: int | None) -> Cache:
        cache = Cache(data.store, root, data.key, limit)
        wanted = data.bytes if limit is None else min(limit, data.bytes)
        room = cache.room()
        if room < wanted:
            what = f"{root} has room for {room / GB:.3g} GB; the data needs {wanted / GB:.3g} GB"
            raise UserError.at("data.cache_dir", what, REMEDY, code="not-enough")
        if self.trainer is None or self.trainer.global_rank == 0:
            if data.note:
                log.warning(data.note)
            shards = [s for split in data.manifest.splits.values() for s in split.shards]
            numbers = size(data.bytes), len(shards), sum(map(cache.has, shards))
            text = "data: %s, %s in %d shards, of which %d are in %s"
            log.info(text, data.store.uri, *numbers, cache.folder)
        return cache

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


def expanded(root: str) -> str:
    """A URI, or a path without `~` and `file://`."""
    return root if is_remote(root) else open_store(root).uri


def is_prepared(root: str) -> bool:
    """Whether `root` holds shards, and not folders of images."""
    return is_remote(root) or Path(root, MANIFEST).exists()


def _is_listed(root: str, patience: float = PATIENCE) -> bool:
    """Whether `root` holds images that are neither prepared nor divided into splits."""
    if is_remote(root):
        return open_store(root, patience=patience).size(MANIFEST) is None
    return Path(root).is_dir() and not any(Path(root, name).exists() for name in (MANIFEST, "val"))


def _cache_root(folder: str | None) -> Path:
    return Path(folder).expanduser() if folder else default_root()


def refuse_different_data(key: str) -> None:
    """Raises UserError on all ranks if their data sets, each identified by its `key`, differ: the
    data at the URI was replaced during the start, or nodes have different local folders."""
    (first, host), *others = process_group.gather((key, socket.gethostname()))
    for rank, (other, its_host) in enumerate(others, 1):
        if other != first:
            what = (
                f"the ranks see different data sets: {first} is rank 0's, on {host}, "
                f"and {other} is rank {rank}'s, on {its_host}"
            )
            raise UserError.at(
                "data.root", what, "copy one of them to every node, or start again", code="mismatch"
            )


def name_different_decoders(decoder: str) -> None:
    """Warns on rank 0 if images are decoded in other ways on some nodes: all wait for the slowest.
    The pixels are the same."""
    of_nodes: dict[str, set[str]] = {}
    for each, host in process_group.gather((decoder, socket.gethostname())):
        of_nodes.setdefault(each, set()).add(host)
    if len(of_nodes) > 1:
        ways = [f"{each} on {first_few(sorted(hosts))}" for each, hosts in of_nodes.items()]
        text = "images: decoded by %s, so some nodes may be slower (docs/data/native.md)"
        log.warning(text, ", by ".join(ways))


def _without_windows(root: str, order: object) -> Iterable[Problem]:
    """The problem of an order of shards in a folder that has none."""
    if order == "windows":
        what = f"{root} is no prepared set, and windows are of its shards"
        yield Problem("order", what, "data.order=shuffled", code="conflict")


def _refuse(problems: Iterable[Problem]) -> None:
    listed = [replace(p, path=f"data.{p.path}") for p in problems]
    if listed:
        raise UserError(*listed)


def _counts_batches(context: Mapping[str, Any] | None) -> bool:
    """Whether a setting depends on the number of batches. Listing a folder may take seconds."""
    trainer = ((context or {}).get("config") or {}).get("trainer") or {}
    return epochs.is_count(trainer.get("val_check_interval"))


def _of_epoch(context: Mapping[str, Any] | None, samples: int) -> Iterable[Problem]:
    """What does not fit the epochs of a run; the path is that of the data node."""
    config = (context or {}).get("config")
    world_size = (context or {}).get("world_size", 1)
    for problem in epochs.problems(config, samples, world_size) if config else ():
        section, _, key = problem.path.partition(".")
        what = problem.what if section == "data" else f"{problem.path} {problem.what}"
        yield Problem(key if section == "data" else "", what, problem.remedy, code=problem.code)


def _most_shards(manifest: Manifest, limit: int) -> int:
    """How many shards a window may have so that the previous, the current and the next one fit."""
    largest = max(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    indices = sum(split.index.bytes for split in manifest.splits.values())
    most = (limit - indices) // (3 * largest)
    if most < 1:
        least = f"data.cache_gb={math.ceil((3 * largest + indices) / GB * 1000) / 1000:g} or more"
        raise UserError.at(
            "data.cache_gb", "is too small for three shards", least, code="not-enough"
        )
    return most
