"""Stored images with objects: a folder in COCO's format, or shards in a folder or a store."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from distdl.config import task_facts
from distdl.data import coco_folder
from distdl.data.coco_folder import PREDICTS, CocoFolder
from distdl.data.encoded import EncodedData, OnDamaged
from distdl.data.sampling import Groups
from distdl.data.shard_reading import Order
from distdl.data.shards import ShardSamples
from distdl.data.stored_data import StoredData
from distdl.datasets.image_headers import MOST_PIXELS
from distdl.datasets.left_out import LeftOut
from distdl.datasets.reading import DataSet
from distdl.domains.detection.categories import Categories
from distdl.domains.detection.domain import Detection
from distdl.domains.detection.views import DetectionView
from distdl.stores import is_remote
from distdl.util.errors import Problem, UserError
from distdl.util.ranges import AboveZero, NotNegative, Positive

FEDERATED = (
    "is federated, as LVIS: an image may show objects of categories that nobody has looked for in "
    "it, so COCO's metric would count right detections as wrong"
)
UNLABELLED = "has no annotations"
VALIDATES = "validates"  # in the node that a check looks at: whether the run evaluates "val"
WITH_OBJECTS = "python -m distdl prepare coco --train JSON ..., with objects"
NO_VALIDATION = "trainer.limit_val_batches=0 trains without a validation"


class StoredObjects(StoredData):
    """Images with objects (`Detection`): COCO, or a data set of that format.

    A batch has lists: "image" of float32 [3, H, W] from 0 to 1 on the device, and "target"
    (`DetectionView`). Training leaves out crowds, augments, and puts images of one shape into a
    batch. An evaluation keeps all annotations.

    `root` is one of

    - a folder in COCO's format: annotations/instances_train2017.json with train2017/, the same of
      val2017, and perhaps annotations/image_info_test2017.json with test2017/; images may be in
      zips,
    - a folder made by `python -m distdl prepare coco`, read in place,
    - the URI of such a folder: each shard is downloaded once per node into `cache_dir`.

    Args:
        root: Where the data are.
        batch_size: Images per device.
        num_classes: Must equal the number of categories in the data.
        masks, keypoints: Whether targets have them: the data must.
        augment: As `DetectionAugment` takes it; None: a flip.
        image_size: The longest side of an image in pixels, in training and validation; larger ones
            are scaled down. None: as they are.
        aspect_groups: Into how many groups images are put by the ratio of width to height, per
            factor of 2: a global batch is of one group. 0: as they come.
        predict_split: Which split is predicted: "val", "test" or "train".
        labels, annotations, images: Of a folder in COCO's format, if its files have other names:
            what annotation files begin with, and by split the files, and the folders and zips.
        decoder, on_damaged, max_pixels: As for `StoredImages`.
        cache_dir, cache_gb, shuffle_window, order, num_workers: As there.

    Raises:
        UserError: In setup, if there is no data, it does not fit, or the cache has no room.
    """

    domain = Detection()
    crops = False

    def __init__(
        self,
        root: str,
        batch_size: int,
        num_classes: Positive = 80,
        masks: bool = True,
        keypoints: bool = False,
        augment: Mapping[str, Any] | None = None,
        image_size: Positive | None = None,
        aspect_groups: NotNegative = 3,
        predict_split: str = "val",
        labels: Sequence[str] | None = None,
        annotations: Mapping[str, Sequence[str]] | None = None,
        images: Mapping[str, Sequence[str]] | None = None,
        num_workers: int | None = None,
        decoder: str = "auto",
        on_damaged: OnDamaged = "skip",
        max_pixels: Positive = MOST_PIXELS,
        cache_dir: str | None = None,
        cache_gb: AboveZero | None = None,
        shuffle_window: Positive = 32,
        order: Order = "shuffled",
    ) -> None:
        node = {
            "num_classes": num_classes,
            "masks": masks,
            "keypoints": keypoints,
            "augment": augment,
            "image_size": image_size,
            "labels": labels,
            "annotations": annotations,
            "images": images,
            "decoder": decoder,
            "max_pixels": max_pixels,
            "predict_split": predict_split,
        }
        super().__init__(
            root,
            batch_size,
            node,
            num_workers=num_workers,
            on_damaged=on_damaged,
            cache_dir=cache_dir,
            cache_gb=cache_gb,
            shuffle_window=shuffle_window,
            order=order,
        )
        self.num_classes = num_classes
        self.aspect_groups = int(aspect_groups)
        self.predict_split = predict_split
        self.categories: Categories | None = None
        # Why a split cannot be evaluated, by its name; "" if it can.
        self._unfit: dict[str, str] = {}

    @classmethod
    def check(
        cls, config: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> Iterable[Problem | str]:
        split = config.get("predict_split", "val")
        if split not in ("train", "val", "test"):
            yield Problem(
                "predict_split",
                what=f"is {split!r}, not train, val or test",
                remedy="data.predict_split=test",
                code="wrong-choice",
            )
            return
        run = (context or {}).get("config") or {}
        limit = (run.get("trainer") or {}).get("limit_val_batches", 1.0)
        predicts = "predict_dataloader" in task_facts.of(run).calls
        asked = {VALIDATES: limit != 0 and not predicts, PREDICTS: predicts}
        yield from super().check({**config, **asked}, context)

    @classmethod
    def check_folder(cls, root: Path, node: Mapping[str, Any]) -> Iterable[Problem]:
        problems, splits = coco_folder.check(root, node)
        yield from problems
        val = splits.get("val")
        if not node.get(VALIDATES) or val is None:
            return
        why = unfit(val.annotations.federated, val.annotations.labelled)
        if why:
            yield Problem(
                "root", what=f"{val.source} {why}", remedy=NO_VALIDATION, code="incomplete"
            )
        elif not problems:
            yield from coco_folder.check_fields(val, node)

    @classmethod
    def count_folder(cls, root: Path, node: Mapping[str, Any]) -> int:
        return len(CocoFolder("train", coco_folder.find(root, node)["train"], None))

    @classmethod
    def misfits(cls, data: DataSet, node: Mapping[str, Any]) -> Iterable[Problem]:
        found = [*super().misfits(data, node)]
        yield from found
        if found:
            return
        if node.get(VALIDATES):
            why = unfit(data.manifest.federated, data.manifest.splits["val"].labelled)
            if why:
                yield Problem(
                    "root",
                    what=f"val of {data.store.uri} {why}",
                    remedy=NO_VALIDATION,
                    code="incomplete",
                )
        if not node.get(PREDICTS) and not _may_learn(data):
            yield Problem(
                "root",
                what=f"train of {data.store.uri} {coco_folder.NOTHING}",
                remedy=WITH_OBJECTS,
                code="not-enough",
            )
        count = len(data.manifest.categories)
        if node.get("num_classes") not in (None, count):
            yield Problem(
                "num_classes",
                what=f"is {node['num_classes']}, but {data.store.uri} has {count} categories",
                remedy=f"data.num_classes={count}",
                code="mismatch",
            )
        for key, field in coco_folder.needed_fields(node):
            if field not in data.manifest.holds:
                yield Problem(
                    key,
                    what=f"{data.store.uri} has no {key}: its objects have no {field}",
                    remedy=f"data.{key}=false, with a model that needs none",
                    code="incomplete",
                )

    @classmethod
    def required(cls, node: Mapping[str, Any]) -> Sequence[str]:
        return coco_folder.required(node)

    def setup(self, stage: str | None = None) -> None:
        self.node = {**self.node, PREDICTS: stage == "predict"}
        super().setup(stage)

    def open_folder(self, root: Path, left_out: LeftOut) -> dict[str, EncodedData]:
        files = coco_folder.find(root, self.node)
        opened: dict[str, EncodedData] = {}
        for split in self.wanted(files):
            view = self.train_view if split == "train" else self.val_view
            samples = CocoFolder(split, files[split], view)
            opened[split] = samples
            self._unfit[split] = unfit(samples.annotations.federated, samples.annotations.labelled)
            if len(opened) == 1:  # of training, if it is there
                self._name(samples.annotations.categories)
            if split == "train":
                samples.groups = self._groups(samples.sizes)
        return opened

    def opened_shards(self, data: DataSet) -> None:
        self._name(data.manifest.categories)
        for split in self.splits:
            labelled = data.manifest.splits[split].labelled
            self._unfit[split] = unfit(data.manifest.federated, labelled)
        train = self.splits.get("train")
        if train is None:
            return
        assert isinstance(train, ShardSamples)
        rows = train.shards.rows
        if not self.node.get(PREDICTS) and not rows["label"].any():  # objects that are learned
            raise UserError.at(
                "data.root",
                what=f"train of {self.root} {coco_folder.NOTHING}",
                remedy=WITH_OBJECTS,
                code="not-enough",
            )
        sizes = np.stack([rows["width"], rows["height"]], 1).astype(np.int64)
        train.groups = self._groups(sizes, train)

    def wanted(self, splits: Mapping[str, object]) -> list[str]:
        """The splits that are opened."""
        if self.predict_split not in splits:
            raise UserError.at(
                "data.predict_split",
                what=f"is {self.predict_split}, and {self.root} has only: {', '.join(splits)}",
                code="mismatch",
            )
        trained = [split for split in ("train", "val") if split in splits]
        return [*dict.fromkeys((*trained, self.predict_split))]

    def _name(self, categories: Iterable[Mapping[str, object]]) -> None:
        try:
            self.categories = Categories.of(categories)
        except ValueError as error:
            raise UserError.at(
                "data.root", what=f"{self.root}: {error}", code="unreadable"
            ) from error
        self.domain = Detection(self.categories)
        for view in (self.train_view, self.val_view):
            assert isinstance(view, DetectionView)
            view.categories = self.categories

    def _groups(
        self, sizes: np.ndarray[Any, Any], samples: ShardSamples | None = None
    ) -> Groups | None:
        """Groups of images by their shape; `sizes` are widths and heights, int64 [N, 2]."""
        if not self.aspect_groups:
            return None
        return Groups(
            by_shape(sizes, self.aspect_groups), None if samples is None else samples.ends
        )

    @property
    def classes(self) -> list[str] | None:
        """The names of the categories, in the order of the labels from 1 on."""
        return None if self.categories is None else [*self.categories.names]

    def val_dataloader(self) -> DataLoader[Any]:
        if self._unfit.get("val"):
            raise UserError.at(
                "data.root",
                what=f"the split val of {self.root} {self._unfit['val']}",
                remedy=NO_VALIDATION,
                code="incomplete",
            )
        return super().val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        samples = copy.copy(self.splits[self.predict_split])
        samples.replaces = False
        view = copy.copy(self.val_view)
        assert isinstance(view, DetectionView)
        view.longest = None
        view.masks = view.keypoints = False
        samples.view = view
        return self.loader(samples, shuffle=False)

    def transfer_batch_to_device(
        self, batch: dict[str, Any], device: torch.device, dataloader_idx: int
    ) -> dict[str, Any]:
        """The tensors on `device`; annotations stay where they are, unvisited."""
        targets = batch["target"]
        known = [target.get("annotations") for target in targets]
        slim = [{k: v for k, v in each.items() if k != "annotations"} for each in targets]
        moved = super().transfer_batch_to_device({**batch, "target": slim}, device, dataloader_idx)
        for target, of_image in zip(moved["target"], known, strict=True):
            if of_image is not None:
                target["annotations"] = of_image
        return moved

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        images = [image.to(torch.float32) / 255 for image in batch["image"]]
        if self.trainer is not None:  # to 16 bits in a pure 16-bit run
            images = [self.trainer.precision_plugin.convert_input(image) for image in images]
        return {**batch, "image": images}


def _may_learn(data: DataSet) -> bool:
    """Whether training images have objects. The index of a URI says it later (`opened_shards`)."""
    if not data.manifest.splits["train"].labelled:
        return False
    return is_remote(data.store.uri) or bool(data.index("train", None)["label"].any())


def unfit(federated: bool, labelled: bool) -> str:
    """Why COCO's metric cannot evaluate a split; "" if it can."""
    if federated:
        return FEDERATED
    return "" if labelled else UNLABELLED


def by_shape(sizes: np.ndarray[Any, Any], groups: int) -> np.ndarray[Any, Any]:
    """The group of each image: by width / height, between 1/2 and 2 in 2 * `groups` equal steps of
    its logarithm, and one each for those beyond; as torchvision's references do.

    Args:
        sizes: Widths and heights in pixels, int64 [N, 2].

    Returns:
        int64 [N], from 0 on.
    """
    edges = 2.0 ** np.linspace(-1, 1, 2 * groups + 1)
    return np.digitize(sizes[:, 0] / np.maximum(sizes[:, 1], 1), edges)
