"""Stored images with classes: class folders, a prepared folder of shards, or shards in a store."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from distdl.data import mixed
from distdl.data.encoded import OnDamaged
from distdl.data.folder import FolderImages, check_folder, count_up_to
from distdl.data.images import WorkerKind
from distdl.data.listed import ListedImages
from distdl.data.roots import QUICK, cache_root, expanded, is_prepared
from distdl.data.shard_reading import Order
from distdl.data.stored_data import StoredData
from distdl.datasets.image_headers import MOST_PIXELS
from distdl.datasets.left_out import LeftOut
from distdl.datasets.reading import DataSet, open_data_set
from distdl.domains.classification.domain import Classification
from distdl.images.augment import IMAGENET_MEAN, IMAGENET_STD
from distdl.images.views import EvalView
from distdl.stores.walking import ClassFolders, class_names
from distdl.util.errors import Problem, UserError
from distdl.util.ranges import AboveZero, Positive
from distdl.util.wording import first_few, plural


class StoredImages(StoredData):
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
        worker_kind: As for `ImageData`.
        order: As for `StoredData`.
        mix: Further sets to train on: {root, weight}. A weight is the share of an epoch that comes
            from that set; the rest is `root`'s. An epoch has as many samples as all sets together
            (`distdl.data.mixed`). Validation and predictions are `root`'s.
        draws: As for `distdl.images.views.TrainView`. `conf/data` has "counter"; a run keeps what
            it was started with.

    Raises:
        UserError: In setup, if there is no data, the classes differ, or the cache has no room.
    """

    domain = Classification()
    reads_listed = True

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
        worker_kind: WorkerKind = "auto",
        draws: Literal["counter", "global"] = "global",
        order: Order = "shuffled",
        mix: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        views = {
            "image_size": image_size,
            "scale": scale,
            "ratio": ratio,
            "mean": mean,
            "std": std,
            "decoder": decoder,
            "augment": augment,
            "resize": resize,
            "val_crop_size": val_crop_size,
            "val_resize_size": val_resize_size,
            "max_pixels": max_pixels,
            "draws": draws,
        }
        super().__init__(
            root,
            batch_size,
            {**views, "num_classes": num_classes},
            num_workers=num_workers,
            mean=mean,
            std=std,
            on_damaged=on_damaged,
            cache_dir=cache_dir,
            cache_gb=cache_gb,
            shuffle_window=shuffle_window,
            worker_kind=worker_kind,
            order=order,
        )
        self.num_classes = num_classes
        self.image_size = image_size
        self.max_pixels = max_pixels
        self.seeds_apart = draws == "counter"
        self.mix = [*(mix or ())]
        self._others: list[StoredImages] = []

    @classmethod
    def check(
        cls, config: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> Iterable[Problem | str]:
        wrong: list[Problem | str] = [*mixed.problems(config)]
        for number, entry in enumerate(() if wrong else config.get("mix") or ()):
            # What does not depend on the set is said of the first one.
            alone = {**config, "root": entry["root"], "mix": None}
            local = {"local": context is None or bool(context["local"])}
            for found in super().check(alone, local):
                if isinstance(found, str):
                    wrong.append(found)
                elif found.path in ("root", "num_classes"):
                    remedy = found.remedy.replace("data.root=", "root: ")
                    wrong.append(replace(found, path=f"mix[{number}].root", remedy=remedy))
        problems = [found for found in wrong if isinstance(found, Problem)]
        if not problems and (context is None or context["local"]):
            wrong += _of_other_classes(config)
        yield from wrong
        refused = any(isinstance(found, Problem) for found in wrong)
        yield from super().check({**config, "mix": None} if refused else config, context)

    @classmethod
    def added(cls, node: Mapping[str, Any]) -> int:
        count = 0
        for entry in node.get("mix") or ():
            root = expanded(str(entry["root"]))
            if is_prepared(root):
                count += open_data_set(root).manifest.splits["train"].samples
            else:
                count += cls.count_folder(Path(root), node)
        return count

    def open(self, stage: str | None) -> None:
        super().open(stage)
        if not self.mix or "train" not in self.splits:
            return
        for number, entry in enumerate(self.mix):
            other = copy.copy(self)
            other.root = expanded(str(entry["root"]))
            other.splits = {}
            other.mix = []
            other._others = []  # a copy shares this one's list, in which it will be itself
            other._order = None
            other.open(stage)
            problem = _differing(number, self.root, self.classes, other.root, other.classes)
            if problem is not None:
                raise UserError(replace(problem, path=f"data.{problem.path}"))
            self._others.append(other)
        every = [self, *self._others]
        for each in every:
            if each._order is not None:
                each._order.fetch_all()
        parts = [each.splits["train"] for each in every]
        self.splits["train"] = mixed.MixedSamples(parts, mixed.weights(self.mix))

    def teardown(self, stage: str | None = None) -> None:
        super().teardown(stage)
        for other in self._others:
            other.teardown(stage)

    @classmethod
    def check_folder(cls, root: Path, node: Mapping[str, Any]) -> Iterable[Problem]:
        return check_folder(root, node.get("num_classes"))

    @classmethod
    def count_folder(cls, root: Path, node: Mapping[str, Any]) -> int:
        return len(FolderImages(root / "train", EvalView(1, 1)))

    @classmethod
    def count_up_to(cls, root: Path, node: Mapping[str, Any], enough: int) -> int:
        return count_up_to(root / "train", enough)

    @classmethod
    def misfits(cls, data: DataSet, node: Mapping[str, Any]) -> Iterable[Problem]:
        yield from super().misfits(data, node)
        count = len(data.manifest.classes)
        if data.manifest.domain == cls.domain.name and node.get("num_classes") not in (None, count):
            classes = plural("class", count)
            yield Problem(
                "num_classes",
                what=f"is {node['num_classes']}, but {data.store.uri} has {count} {classes}",
                remedy=f"data.num_classes={count}",
                code="mismatch",
            )

    def open_folder(self, root: Path, left_out: LeftOut) -> dict[str, FolderImages]:
        folders = ClassFolders(root, "data.root")
        views = ("train", self.train_view), ("val", self.val_view)
        return {split: FolderImages(root / split, view, folders, left_out) for split, view in views}

    def open_listed(self) -> ListedImages:
        return ListedImages(self.root, self.val_view)

    @property
    def classes(self) -> list[str] | None:
        """Their names, in the order of the labels; None if `root` does not say them."""
        return getattr(self.splits.get("train"), "classes", None)


def _of_other_classes(config: Mapping[str, Any]) -> Iterable[Problem]:
    """Sets of a mixture that have other classes than the first one. Some other check names a set
    that cannot be opened."""
    with suppress(UserError, OSError):
        ours = _classes(config["root"], config)
        for number, entry in enumerate(config.get("mix") or ()):
            theirs = _classes(entry["root"], config)
            problem = _differing(number, config["root"], ours, entry["root"], theirs)
            if problem is not None:
                yield problem


def _classes(root: str, config: Mapping[str, Any]) -> Sequence[str]:
    """The names of a set's classes, in the order of the labels."""
    if not is_prepared(expanded(root)):
        return class_names(Path(expanded(root), "train"))
    folder = cache_root(config.get("cache_dir"))
    return open_data_set(expanded(root), patience=QUICK, cache_root=folder).manifest.classes


def _differing(
    number: int, root: str, ours: Sequence[str] | None, other: str, theirs: Sequence[str] | None
) -> Problem | None:
    if [*(ours or ())] == [*(theirs or ())]:
        return None
    differing = first_few(sorted({*(theirs or ())} ^ {*(ours or ())}))
    return Problem(
        f"mix[{number}].root",
        what=f"{other} has other classes than {root}: {differing}",
        remedy="sets whose classes have the same names, in the same order",
        code="mismatch",
    )
