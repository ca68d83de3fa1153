"""Stored images: class folders, a prepared folder of shards, or shards in a store."""

from __future__ import annotations

import copy
import logging
import math
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from distdl.config import epochs, task_facts
from distdl.data.encoded import EncodedImages, OnDamaged
from distdl.data.folder import FolderImages, check_folder
from distdl.data.images import ImageData
from distdl.data.listed import ListedImages
from distdl.data.shards import ShardImages, TrainOrder
from distdl.datasets.cache import REMEDY, Cache
from distdl.datasets.format import MANIFEST, Manifest
from distdl.datasets.image_headers import MOST_PIXELS
from distdl.datasets.left_out import LeftOut
from distdl.datasets.order import Needs, Windows
from distdl.datasets.prefetch import Prefetch
from distdl.datasets.reading import DataSet, Shards, open_data_set
from distdl.distributed import process_group
from distdl.images.augment import IMAGENET_MEAN, IMAGENET_STD, Augment
from distdl.images.views import EvalView, TrainView, View, check_views
from distdl.stores import PATIENCE, is_remote, open_store
from distdl.stores.files import readable
from distdl.stores.walking import ClassFolders
from distdl.util.cache_folder import default_root
from distdl.util.errors import Problem, UserError
from distdl.util.progress_bar import size
from distdl.util.ranges import AboveZero, Positive
from distdl.util.wording import plural

log = logging.getLogger(__name__)

GB = 10**9
QUICK = 5.0  # seconds that a check waits for a server


class StoredImages(ImageData):
    """Images for classification: ImageNet, or any data set of that form.

    Training takes a random crop, a flip, and what `augment` adds. Validation resizes the short side
    and crops the centre, as torchvision's references do. Images are uint8 until the device.

    `root` is one of

    - a folder that holds `train/<class>/*.jpg` and `val/<class>/*.jpg` (labels are indices of the
      sorted class folders),
    - a folder made by `python -m distdl prepare`, read in place,
    - the URI of such a folder, `azure://container/path` or another form of `distdl.stores`: each
      shard is downloaded once per node into `cache_dir`.

    Predictions are of the validation images. For them `root` may also be a folder of images without
    `val/`, or the URI of one (`distdl.data.listed`).

    Args:
        root: Where the images are.
        batch_size: Images per device.
        num_classes: Must equal the number of classes in the data.
        image_size: Height and width in pixels after cropping: torchvision's --train-crop-size.
        scale: Smallest and largest share of the area that a random crop takes.
        ratio: Smallest and largest aspect ratio (width / height) of a random crop.
        num_workers: Processes that decode; None: this rank's share of the cores, less one or two.
        mean, std: The device normalises red, green and blue by these; for values from 0 to 1.
        decoder: A name in `distdl.images.decoding`; "auto": the fastest that is installed.
        augment: As `distdl.images.augment.Augment` takes it; None: a flip.
        resize: {from, to, until_epoch}: progressive resizing (`distdl.images.resizing`).
        val_crop_size: Height and width in validation, in pixels; None: `image_size`. The names
            of this argument and the next are from torchvision's references
            (https://github.com/pytorch/vision/blob/main/references/classification/train.py).
        val_resize_size: The short side before that crop, in pixels; None: 256/224 of it, rounded.
        on_damaged: "skip" or "error", for an image that cannot be decoded.
        max_pixels: An image with more counts as damaged, so that a small file cannot fill the
            memory. An export has the same limit.
        cache_dir: Where shards of a URI are cached; None: `datasets.cache.default_root`. If set,
            shards of a local `root`, such as a slow mount, are copied there, too.
        cache_gb: Size limit of `cache_dir`, in 10**9 bytes; None: limited by the disk. If it is
            less than the data set, shards are evicted and every epoch is shuffled in windows.
        shuffle_window: Shards per window, for epochs that are shuffled in windows. Reduced if
            three windows would not fit `cache_gb`.

    Raises:
        UserError: In setup, if there is no data, the classes differ, or the cache has no room.
    """

    def __init__(
        self,
        root: str,
        batch_size: int,
        num_classes: Positive = 1000,
        image_size: Positive = 224,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        num_workers: int | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        decoder: str = "auto",
        augment: Mapping[str, Any] | None = None,
        resize: Mapping[str, Any] | None = None,
        val_crop_size: int | None = None,
        val_resize_size: int | None = None,
        on_damaged: OnDamaged = "skip",
        cache_dir: str | None = None,
        cache_gb: AboveZero | None = None,
        shuffle_window: Positive = 32,
        max_pixels: Positive = MOST_PIXELS,
    ) -> None:
        super().__init__(batch_size, num_workers, mean, std, on_damaged)
        self.root = _expanded(root)
        self.num_classes = num_classes
        self.image_size = image_size
        self.max_pixels = max_pixels
        self.cache_dir = cache_dir
        self.cache_gb = cache_gb
        self.shuffle_window = shuffle_window
        augmented = Augment(augment, mean, std)
        crop = val_crop_size or image_size
        self._train_view: View = TrainView(
            image_size, scale, ratio, decoder, augmented, resize, max_pixels
        )
        self._val_view: View = EvalView(crop, val_resize_size, decoder, max_pixels)
        self._splits: dict[str, EncodedImages] = {}
        self._order: TrainOrder | None = None

    @staticmethod
    def check(
        config: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> Iterable[Problem | str]:
        """Problems of a data node, with paths relative to it, and notes (str) for the user. Files
        and servers are checked only for a local run: a remote job may see other ones.

        Args:
            context: {"local": whether the run is on this machine}; None: it is.
        """
        local = context is None or bool(context["local"])
        yield from check_views(config, local)
        predicts = "predict_dataloader" in task_facts.of((context or {}).get("config", {})).calls
        if not local:
            yield f"the job itself checks {str(config['root']).partition('?')[0]}"  # no signature
            return
        classes = config.get("num_classes")
        try:
            root = _expanded(str(config["root"]))
            with readable("root"):
                if predicts and _is_listed(root, QUICK):
                    return
                if not _is_prepared(root):
                    found = [*check_folder(Path(root), classes)]
                    yield from found
                    if not found and _counts_batches(context):
                        images = FolderImages(Path(root, "train"), EvalView(1, 1))
                        yield from _of_epoch(context, len(images))
                    return
            data = open_data_set(
                root, patience=QUICK, cache_root=_cache_root(config.get("cache_dir"))
            )
            if data.note:
                yield data.note
            found = [*_misfits(data, classes)]
            yield from found
            if not found:
                yield from _of_epoch(context, data.manifest.splits["train"].samples)
        except UserError as error:
            yield from (replace(p, path="root") for p in error.problems)

    def setup(self, stage: str | None = None) -> None:
        if self._splits:
            return
        with readable("data.root"):
            if stage == "predict" and _is_listed(self.root):
                listed = ListedImages(self.root, self._val_view)
                self._splits["val"] = listed
                return self._say(listed.left_out)
            if not (prepared := _is_prepared(self.root)):
                _refuse(check_folder(Path(self.root), self.num_classes))
                folders = ClassFolders(Path(self.root), "data.root")
                left_out = LeftOut()
                splits = {
                    split: FolderImages(Path(self.root, split), view, folders, left_out)
                    for split, view in (("train", self._train_view), ("val", self._val_view))
                }
        if prepared:
            return self._open_shards()
        refuse_different_data("-".join(images.key[:12] for images in splits.values()))
        self._say(left_out)
        self._splits.update(splits)

    def _say(self, left_out: LeftOut) -> None:
        """Names what is left out of the data, once."""
        if self.trainer is None or self.trainer.global_rank == 0:
            for line in left_out.lines():
                log.warning("data: %s", line)

    @property
    def classes(self) -> list[str] | None:
        """Their names, in the order of the labels; None if `root` does not say them."""
        return getattr(self._splits.get("train"), "classes", None)

    def _open_shards(self) -> None:
        cache_root = _cache_root(self.cache_dir)
        data = open_data_set(self.root, cache_root=cache_root)
        refuse_different_data(data.key[:12])
        _refuse(_misfits(data, self.num_classes))
        in_place = not is_remote(self.root) and self.cache_dir is None
        limit = None if self.cache_gb is None else int(self.cache_gb * GB)
        fits = in_place or limit is None or data.bytes <= limit
        cache = None if in_place else self._cache(data, cache_root, limit)
        window: int = self.shuffle_window
        epochs: int | None = 0 if in_place else 1
        if limit is not None and not fits:
            window = min(window, _most_shards(data.manifest, limit))
            epochs = None
        train, val = data.split("train"), data.split("val")
        samples = tuple(shard.samples for shard in train.shards)
        needs = Needs(Windows(samples, window, epochs), train, val)
        evictable = None if fits else needs.farthest_first
        shards = {name: Shards(data, name, cache, evictable) for name in ("train", "val")}
        prefetch = None
        if cache is not None and (self.trainer is None or self.trainer.local_rank == 0):
            if is_remote(self.root) and not data.note:
                data.keep(cache.root)
            its_cache = Cache(open_store(self.root), cache.root, data.key, limit)
            prefetch = Prefetch(its_cache, None if fits else needs.needed_later)
        self._order = TrainOrder(needs, shards["train"], shards["val"], prefetch, self._used)
        self._splits["train"] = ShardImages(self._train_view, shards["train"], self._order)
        self._splits["val"] = ShardImages(self._val_view, shards["val"])

    def _cache(self, data: DataSet, root: Path, limit: int | None) -> Cache:
        cache = Cache(data.store, root, data.key, limit)
        wanted = data.bytes if limit is None else min(limit, data.bytes)
        room = cache.room()
        if room < wanted:
            what = f"{root} has room for {room / GB:.3g} GB; the data needs {wanted / GB:.3g} GB"
            raise UserError.at("data.cache_dir", what, REMEDY)
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
            size = len(self._splits[split])
            if trainer is not None and isinstance(limit, int):
                return min(size, limit * self.batch_size * trainer.world_size)
            return math.ceil(size * limit)

        limits = (trainer.limit_train_batches, trainer.limit_val_batches) if trainer else (1.0, 1.0)
        return used("train", limits[0]), used("val", limits[1])

    def teardown(self, stage: str | None = None) -> None:
        if self._order is not None:
            self._order.close()

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self._splits["train"], shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(self._splits["val"], shuffle=False)

    def predict_dataloader(self) -> DataLoader[Any]:
        images = copy.copy(self._splits["val"])
        images.replaces = False
        return self.loader(images, shuffle=False)


def _expanded(root: str) -> str:
    """A URI, or a path without `~` and `file://`."""
    return root if is_remote(root) else open_store(root).uri


def _is_prepared(root: str) -> bool:
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
            raise UserError.at("data.root", what, "copy one of them to every node, or start again")


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
        yield Problem(key if section == "data" else "", what, problem.remedy)


def _misfits(data: DataSet, num_classes: int | None) -> Iterable[Problem]:
    """How a prepared data set differs from the settings of the data node."""
    manifest = data.manifest
    for split in {"train", "val"} - manifest.splits.keys():
        yield Problem("root", f"{data.store.uri} has no {split!r}", f"it has {[*manifest.splits]}")
    for name in [name for name, split in manifest.splits.items() if not split.samples]:
        remedy = "python -m distdl prepare ... makes both splits (docs/data/prepare.md)"
        yield Problem("root", f"{data.store.uri} has no sample in {name!r}", remedy)
    count = len(manifest.classes)
    if num_classes not in (None, count):
        what = f"is {num_classes}, but {data.store.uri} has {count} {plural('class', count)}"
        yield Problem("num_classes", what, f"data.num_classes={count}")


def _most_shards(manifest: Manifest, limit: int) -> int:
    """How many shards a window may have so that the previous, the current and the next one fit."""
    largest = max(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    indices = sum(split.index.bytes for split in manifest.splits.values())
    most = (limit - indices) // (3 * largest)
    if most < 1:
        least = f"data.cache_gb={math.ceil((3 * largest + indices) / GB * 1000) / 1000:g} or more"
        raise UserError.at("data.cache_gb", "is too small for three shards", least)
    return most
