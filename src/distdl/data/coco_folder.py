"""A folder in COCO's format, read as it is: annotation files, and images in folders or zips."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from distdl.data.encoded import EncodedData
from distdl.datasets import coco_layout
from distdl.datasets.annotation_files import AnnotationSource
from distdl.datasets.coco import Annotations
from distdl.datasets.coco_layout import Images, SplitFiles
from distdl.datasets.image_headers import DamagedImage
from distdl.domains.detection.domain import Detection
from distdl.domains.detection.record import ImageObjects
from distdl.domains.domain import View
from distdl.stores.files import readable
from distdl.util.errors import Problem, UserError
from distdl.util.wording import first_few

LAYOUT = "annotations/{}_train2017.json, train2017/, and the same of val2017"
# In the node that a check looks at: whether the run predicts, and so needs `predict_split` alone.
PREDICTS = "predicts"
NOTHING = "has no annotation of an object, so there is nothing to learn"
PREPARE = "python -m distdl prepare coco --source {} --to OUT reads it, too"


def find(root: Path, node: Mapping[str, Any]) -> dict[str, SplitFiles]:
    """The files of each split, by the keys `labels`, `annotations` and `images` of a data node.

    Raises:
        UserError: There is none, or an annotation file is in a zip.
    """
    splits = coco_layout.find(
        root,
        "data.root",
        node.get("labels") or coco_layout.LABELS,
        node.get("annotations"),
        node.get("images"),
    )
    for files in splits.values():
        for file in files.annotations:
            if file.member:
                raise UserError.at(
                    "data.root",
                    what=f"{file.path} holds the annotations, which are read at many places",
                    remedy=f"unzip it there, or {PREPARE.format(root)}",
                    code="unsupported",
                )
    return splits


def check(root: Path, node: Mapping[str, Any]) -> tuple[list[Problem], dict[str, CocoFolder]]:
    """Problems of such a folder, with paths relative to the data node, and its splits as far as
    they could be opened."""
    opened: dict[str, CocoFolder] = {}
    if not root.is_dir():
        code = "wrong-kind" if root.exists() else "not-found"
        return [
            Problem(
                "root",
                what=f"{root} is a file" if root.exists() else f"{root} does not exist",
                remedy="data.root=/path/to/coco",
                code=code,
            )
        ], opened
    try:
        with readable("root"):
            splits = find(root, node)
            missing = [split for split in required(node) if split not in splits]
            if missing:
                what = f"{root} has no annotation file of {' and '.join(missing)}"
                (label, *_) = node.get("labels") or coco_layout.LABELS
                return [
                    Problem(
                        "root",
                        what=what,
                        remedy=f"it must hold {LAYOUT.format(label)}",
                        code="incomplete",
                    )
                ], opened
            for split, files in splits.items():
                opened[split] = CocoFolder(split, files, None)
    except UserError as error:
        return [replace(each, path="root") for each in error.problems], opened
    first = next(iter(opened.values()))  # of training, if it is there
    problems = [*check_training(first, node)]
    if not node.get(PREDICTS) and not first.annotations.count_all:
        problems.append(
            Problem(
                "root",
                what=f"{first.source} {NOTHING}",
                remedy="name a file with objects: data.annotations={train: [FILE]}",
                code="not-enough",
            )
        )
    for samples in opened.values():
        problems += check_categories(first, samples)
        problems += check_boxes(samples)
    return problems, opened


def required(node: Mapping[str, Any]) -> tuple[str, ...]:
    """The splits that must be there."""
    return (str(node.get("predict_split", "val")),) if node.get(PREDICTS) else ("train", "val")


def check_training(samples: CocoFolder, node: Mapping[str, Any]) -> Iterable[Problem]:
    """How the training split, or what stands for it, differs from the data node; paths are relative
    to that."""
    count = len(samples.classes)
    if node.get("num_classes") not in (None, count):
        yield Problem(
            "num_classes",
            what=f"is {node['num_classes']}, but {samples.source} has {count} categories",
            remedy=f"data.num_classes={count}",
            code="mismatch",
        )
    yield from check_fields(samples, node)


def check_fields(samples: CocoFolder, node: Mapping[str, Any]) -> Iterable[Problem]:
    """What the objects of a split lack, and the data node asks for."""
    for key, field in needed_fields(node):
        lacking = samples.lacking(field)
        if lacking is not None:
            yield Problem(
                key,
                what=f"{samples.source}: annotation {lacking} has no {field}",
                remedy=f"data.{key}=false, with a model that needs none",
                code="incomplete",
            )


def needed_fields(node: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The keys of a data node that ask for a field of each object, with that field. A prediction
    asks for none."""
    wanted: list[tuple[str, str]] = []
    if node.get(PREDICTS):
        return wanted
    if node.get("masks", True):
        wanted.append(("masks", "segmentation"))
    if node.get("keypoints", False):
        wanted.append(("keypoints", "keypoints"))
    return wanted


def check_categories(train: CocoFolder, other: CocoFolder) -> Iterable[Problem]:
    """Whether a split has the categories of the training split; one of a test may have none."""
    named = [{c["id"]: c["name"] for c in s.annotations.categories} for s in (train, other)]
    if named[1] and named[0] != named[1]:
        differing = sorted(named[0].items() ^ named[1].items())
        shown = first_few([f"{identity} {name!r}" for identity, name in differing])
        yield Problem(
            "root",
            what=f"the categories of {train.source} and {other.source} differ: {shown}",
            remedy="both need the same ids and names",
            code="mismatch",
        )


def check_boxes(samples: CocoFolder) -> Iterable[Problem]:
    """Whether boxes lie in their images: no network could find others, and each would lower AP."""
    outside = samples.annotations.outside
    if outside:
        have = "annotations have boxes" if len(outside) > 1 else "annotation has a box"
        where = "outside of the image, or with a negative side"
        yield Problem(
            "root",
            what=f"{samples.source}: {len(outside):,} {have} {where}: {first_few(outside)}",
            remedy="correct or remove them",
            code="out-of-range",
        )


class CocoFolder(EncodedData):
    """The images of a split, with their objects.

    Args:
        split: For messages.
        files: Of the split; no annotation file is in a zip.
        view: Of `Detection`; None: only `annotation` and `read` are called.

    Raises:
        UserError: An annotation file is damaged or of another form, or images are missing.
    """

    domain = Detection()

    def __init__(self, split: str, files: SplitFiles, view: View | None) -> None:
        super().__init__(view)  # type: ignore[arg-type]
        self.split = split
        self.source = ", ".join(file.name for file in files.annotations)
        opened = [AnnotationSource(f.name, f.path.open("rb")) for f in files.annotations]
        self.annotations = Annotations(opened, "data.root")
        self.images = Images(files.images, "data.root")
        names = self.annotations.files
        self._refuse_missing(names)
        # In one array: in a list, reference counting would copy all texts into each worker.
        self._names = np.array([os.fsencode(name) for name in names], dtype=np.bytes_)
        self.annotations.files = []
        self.classes = [str(c["name"]) for c in self.annotations.categories]
        self.folder = files.images[0] if files.images else Path()
        self.sizes = self.annotations.sizes  # int64 [N, 2]: width and height
        self.key = self._key()

    def _refuse_missing(self, names: Sequence[str]) -> None:
        missing = self.images.missing(names)
        if missing:
            where = first_few([str(place) for place in self.images.places]) or "the folder"
            raise UserError.at(
                "data.root",
                what=(
                    f"{len(missing):,} of {len(names):,} images of {self.source} are not in "
                    f"{where}: "
                    f"{first_few(missing)}"
                ),
                remedy=f"data.images={{{self.split}: [PATH]}}",
                code="incomplete",
            )

    def _key(self) -> str:
        listing = hashlib.sha256(str(self.annotations.categories).encode())
        for array in (self._names, self.annotations.ids, *self.annotations.places):
            listing.update(np.ascontiguousarray(array).data)
        return listing.hexdigest()

    def __len__(self) -> int:
        return len(self._names)

    def sample_name(self, index: int) -> str:
        return os.fsdecode(bytes(self._names[index]))

    def name(self, index: int) -> str:
        found = self.images.find(self.sample_name(index))
        return self.sample_name(index) if found is None else self.images.shown(found)

    def read(self, index: int) -> bytes:
        found = self.images.find(self.sample_name(index))
        if found is None:
            raise DamagedImage("is missing")
        try:
            return self.images.read(found)
        except OSError as error:
            raise DamagedImage(f"cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise DamagedImage(str(error)) from error

    def annotation(self, index: int) -> ImageObjects:
        try:
            return self.domain.record.decode(self.annotations.record(index))
        except ValueError as error:
            raise DamagedImage(f"its annotations cannot be used: {error}") from error

    def lacking(self, field: str) -> int | None:
        """The id of an object of the first images without a field, if none of them has it."""
        first = None
        with_objects = [i for i in range(len(self)) if self.annotations.count(i)][:LOOKED_AT]
        for index in with_objects:
            try:
                objects = self.annotation(index).objects or ()
            except DamagedImage:  # which is named, and replaced, where it is trained on
                continue
            for each in objects:
                if each.get(field):
                    return None
                first = each["id"] if first is None else first
        return first


LOOKED_AT = 50  # images, to see whether a set has masks
