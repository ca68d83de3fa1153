"""One annotation file in COCO's format: what is in it, and where each text lies.

    {"images": [{"id": 391895, "file_name": "000000391895.jpg", "width": 640, "height": 360}, ...],
     "annotations": [{"id": 151091, "image_id": 391895, "category_id": 4, "bbox": [x, y, w, h],
                      "area": ..., "iscrowd": 0, "segmentation": ...}, ...],
     "categories": [{"id": 4, "name": "motorcycle", ...}, ...]}

The format is described at https://cocodataset.org/#format-data.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from distdl.datasets import json_entries
from distdl.datasets.json_entries import JsonEntry
from distdl.util.safe_paths import odd
from distdl.util.wording import first_few

SHOWN = 10  # of what is wrong, more than a message shows
FEDERATED = ("neg_category_ids", "not_exhaustive_category_ids")  # keys of LVIS's images
# What other files of COCO have in place of boxes.
OTHERS = {"caption": "captions", "segments_info": "panoptic segments", "score": "results"}
LARGEST = 2**63 - 1
NO_BOX = (math.nan,) * 4


@dataclass(frozen=True)
class AnnotationPart:
    """One annotation file as it was read: texts are at `offset` and `length` in the file."""

    images: np.ndarray[Any, Any]  # int64 [N, 3]: id, offset, length
    annotations: np.ndarray[Any, Any]  # int64 [M, 5]: id, image's id, category's id, offset, length
    files: list[str]  # of the images
    sizes: np.ndarray[Any, Any]  # int64 [N, 2]: width and height
    boxes: np.ndarray[Any, Any]  # float64 [M, 4]: x, y, width, height; NaN: it has no such box
    categories: list[dict[str, Any]] = field(default_factory=list)
    labelled: bool = False
    federated: bool = False


@dataclass
class AnnotationSource:
    """An annotation file: a name for messages, and what opens it for reading at any place."""

    name: str
    file: BinaryIO

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self.file.fileno(), int(length), int(offset))

    def __reduce__(self) -> tuple[Any, ...]:
        """In a process that is not forked, a file of that name is opened again."""
        return _reopened, (self.name,)


def _reopened(name: str) -> AnnotationSource:
    return AnnotationSource(name, open(name, "rb"))


def as_object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"has {str(value)[:60]!r} in place of an object")
    return value


def read_part(source: AnnotationSource, progress: Callable[[int], None]) -> AnnotationPart:
    """Reads a file once. `progress` is called with the bytes that were read.

    Raises:
        ValueError: It is not of COCO's format, or contradicts itself.
    """
    source.file.seek(0)
    images = array("q")
    annotations = array("q")
    files: list[str] = []
    sizes = array("q")
    boxes = array("d")
    categories: list[dict[str, Any]] = []
    keys = set[str]()
    federated = False
    for number, entry in enumerate(json_entries.entries(source.file)):
        keys.add(entry.key)
        if entry.value is None and not entry.length:
            continue
        if entry.key == "images":
            image = _fields(source, entry)
            federated = federated or any(image.get(key) for key in FEDERATED)
            images.extend((_whole(image, "image", "id"), entry.offset, entry.length))
            files.append(_file_of(image))
            sizes.extend(_whole(image, "image", key) for key in ("width", "height"))
            if min(sizes[-2:]) < 1:
                raise ValueError(f"image {image['id']} is {sizes[-2]} x {sizes[-1]} pixels")
        elif entry.key == "annotations":
            annotation = as_object(entry.value)
            _refuse_other(annotation)
            row = [_whole(annotation, "annotation", k) for k in ("id", "image_id", "category_id")]
            annotations.extend((*row, entry.offset, entry.length))
            boxes.extend(_box_of(annotation))
        elif entry.key == "categories":
            category = _fields(source, entry)
            category["id"] = _whole(category, "category", "id")
            if not isinstance(category.get("name"), str) or not category["name"]:
                raise ValueError(f"category {category['id']} has no name")
            categories.append(category)
        if number % 1000 == 0:
            progress(entry.offset)
    if missing := {"images", "categories"} - keys:
        held = ", ".join(map(repr, sorted(keys)[:SHOWN])) or "nothing"
        raise ValueError(f"has no {' and no '.join(map(repr, sorted(missing)))}, only {held}")
    part = AnnotationPart(
        np.frombuffer(images, np.int64).reshape(-1, 3),
        np.frombuffer(annotations, np.int64).reshape(-1, 5),
        files,
        np.frombuffer(sizes, np.int64).reshape(-1, 2),
        np.frombuffer(boxes, np.float64).reshape(-1, 4),
        categories,
        "annotations" in keys,
        federated,
    )
    _refuse_twice("image", part.images[:, 0])
    _refuse_twice("annotation", part.annotations[:, 0])
    _refuse_twice("category", np.array([category["id"] for category in categories], np.int64))
    if not len(part.images):
        raise ValueError("lists no image")
    return part


def _box_of(annotation: dict[str, Any]) -> Sequence[float]:
    """Its box; NaN if that is none: whoever reads the record refuses it."""
    box = annotation.get("bbox")
    if isinstance(box, list) and len(box) == 4:
        with suppress(TypeError, OverflowError):
            return array("d", box)
    return NO_BOX


def _fields(source: AnnotationSource, entry: JsonEntry) -> dict[str, Any]:
    """An entry whose texts are needed."""
    text = source.read(entry.offset, entry.length)
    return as_object(entry.value if text.isascii() else json_entries.parsed(text))


def _whole(mapping: dict[str, Any], noun: str, key: str) -> int:
    value = mapping.get(key)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if type(value) is not int or abs(value) > LARGEST:
        name = "a category" if noun == "category" else f"an {noun}"
        if key != "id" and "id" in mapping:
            name = f"{noun} {mapping['id']!r}"[:60]
        if key not in mapping:
            raise ValueError(f"{name} has no {key!r}, but {', '.join(sorted(mapping)[:8])}")
        raise ValueError(f"{name} has the {key} {str(value)[:40]!r}, not a whole number")
    return value


def _file_of(image: dict[str, Any]) -> str:
    """The name of an image's file; LVIS has only the end of an address, folder/name."""
    name = image.get("file_name")
    if name is None and isinstance(image.get("coco_url"), str):
        name = "/".join(image["coco_url"].split("/")[-2:])
    if not isinstance(name, str) or not name:
        raise ValueError(f"image {image['id']} has no file_name")
    if why := odd(name):
        raise ValueError(f"image {image['id']} has the file_name {name[:80]!a}, which {why}")
    return name


def _refuse_other(annotation: dict[str, Any]) -> None:
    for key, kind in OTHERS.items():
        if key in annotation and ("bbox" not in annotation or key == "score"):
            raise ValueError(f"holds {kind}, and no objects")


def _refuse_twice(noun: str, ids: np.ndarray[Any, Any]) -> None:
    found, counts = np.unique(ids, return_counts=True)
    if len(twice := found[counts > 1]):
        shown = first_few(twice[:SHOWN].tolist())
        raise ValueError(f"{len(twice):,} ids are of more than one {noun}: {shown}")
