"""Annotations in COCO's format: which belong to which image, and where they lie in their files.

    {"images": [{"id": 391895, "file_name": "000000391895.jpg", "width": 640, "height": 360}, ...],
     "annotations": [{"id": 151091, "image_id": 391895, "category_id": 4, "bbox": [x, y, w, h],
                      "area": ..., "iscrowd": 0, "segmentation": ...}, ...],
     "categories": [{"id": 4, "name": "motorcycle", ...}, ...]}

The format is described at https://cocodataset.org/#format-data. Only places are kept in memory, 32
bytes of an annotation: its text is read again when it is needed.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from distdl.datasets import json_entries
from distdl.datasets.json_entries import JsonEntry
from distdl.util.errors import UserError
from distdl.util.safe_paths import odd
from distdl.util.wording import first_few, plural

SHOWN = 10  # of what is wrong, more than a message shows
FEDERATED = ("neg_category_ids", "not_exhaustive_category_ids")  # keys of LVIS's images
# What other files of COCO have in place of boxes.
OTHERS = {"caption": "captions", "segments_info": "panoptic segments", "score": "results"}
LARGEST = 2**63 - 1
NO_BOX = (math.nan,) * 4

Progress = Callable[[int, int], None]


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


class Annotations:
    """The annotations of one split, from one file or several, with images in the order of the
    first file.

    An image or an annotation in several files (`instances_*` and `person_keypoints_*`) is one, with
    the keys of each. Give files that are not written to meanwhile.

    Args:
        sources: At least one.
        progress: Called with the bytes that were read, and those of all files.
        where: The path of a Problem: "--source" or "data.root".

    Raises:
        UserError: A file is not of COCO's format, or contradicts itself or another one.
    """

    def __init__(
        self,
        sources: Sequence[AnnotationSource],
        where: str,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.sources = list(sources)
        self.where = where
        sizes = [os.fstat(source.file.fileno()).st_size for source in sources]
        # Annotations whose box lies outside their image, or has a negative side, in words.
        self.outside: list[str] = []
        parts = []
        for number, source in enumerate(sources):
            before = sum(sizes[:number])
            with self._named(source):
                parts.append(_read(source, lambda done: progress(before + done, sum(sizes))))  # noqa: B023
        self.labelled = any(part.labelled for part in parts)
        self.federated = any(part.federated for part in parts)
        self.categories = self._categories(parts)
        self._index(parts)

    def __len__(self) -> int:
        return len(self.ids)

    def record(self, index: int) -> bytes:
        """The record of an image, as JSON: {"image": {...}, "annotations": [{...}, ...]}.

        The texts are those of the files. "annotations" is missing if the split has none.

        Raises:
            ValueError: Files contradict each other about it.
        """
        image = self._united([self._text(row) for row in self._rows(self._images, index)])
        if not self.labelled:
            return b'{"image": ' + image + b"}"
        rows = self._rows(self._annotations, index)
        _, first = np.unique(rows[:, 0], return_index=True)
        texts = []
        for row in rows[np.sort(first)]:
            same = rows[rows[:, 0] == row[0]] if len(first) < len(rows) else row[None]
            texts.append(self._united([self._text(each) for each in same]))
        return b'{"image": ' + image + b', "annotations": [' + b", ".join(texts) + b"]}"

    def count(self, index: int) -> int:
        """How many annotations an image has; those in several files count for each."""
        return int(self._annotations.starts[index + 1] - self._annotations.starts[index])

    @property
    def count_all(self) -> int:
        """How many annotations all images have."""
        return len(self._annotations.rows)

    @property
    def places(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Where the texts of images and annotations are: they tell data sets apart."""
        return self._images.rows, self._annotations.rows

    def _rows(self, table: _Table, index: int) -> np.ndarray[Any, Any]:
        return table.rows[table.starts[index] : table.starts[index + 1]]

    def _text(self, row: np.ndarray[Any, Any]) -> bytes:
        """The text of an entry, which a row (id, file, offset, length) names."""
        return self.sources[int(row[1])].read(row[2], row[3])

    def _united(self, texts: list[bytes]) -> bytes:
        if len(set(texts)) == 1:
            return texts[0]
        return _dumped(unite([_mapping(json_entries.parsed(text)) for text in texts]))

    def _categories(self, parts: Sequence[AnnotationPart]) -> list[dict[str, Any]]:
        """All categories, by their ids."""
        found: dict[int, dict[str, Any]] = {}
        for source, part in zip(self.sources, parts, strict=True):
            for category in part.categories:
                identity = category["id"]
                with self._named(source):
                    known = [found[identity]] if identity in found else []
                    found[identity] = unite([*known, category])
        names = [category["name"] for category in found.values()]
        if twice := {name for name in names if names.count(name) > 1}:
            what = f"{self._names} name two categories {min(twice)!r}"
            raise UserError.at(
                self.where, what, "give each category a name of its own", code="ambiguous"
            )
        return [found[identity] for identity in sorted(found)]

    def _index(self, parts: Sequence[AnnotationPart]) -> None:
        first = parts[0].images[:, 0]
        later = [part.images[:, 0] for part in parts[1:]]
        new = [ids[~np.isin(ids, first)] for ids in later]
        everything = np.concatenate([first, *new])
        _, places = np.unique(everything, return_index=True)
        self.ids = everything[np.sort(places)]  # int64 [N]
        order = np.argsort(self.ids)
        sorted_ids = self.ids[order]
        known = {category["id"] for category in self.categories}
        images = []
        annotations = []
        self.files = [""] * len(self.ids)
        self.sizes = np.zeros((len(self.ids), 2), np.int64)  # width and height
        for number, (source, part) in enumerate(zip(self.sources, parts, strict=True)):
            at = order[np.searchsorted(sorted_ids, part.images[:, 0])]
            self._take_images(source, part, at)
            images.append(_located(at, number, part.images[:, [0, 1, 2]]))
            table = part.annotations
            place = np.minimum(np.searchsorted(sorted_ids, table[:, 1]), len(self.ids) - 1)
            lost = table[sorted_ids[place] != table[:, 1]] if len(self.ids) else table
            self._refuse(source, lost, 1, "image")
            unknown = table[~np.isin(table[:, 2], [*known])]
            self._refuse(source, unknown, 2, "category")
            annotations.append(_located(order[place], number, table[:, [0, 3, 4]]))
            self.outside += _outside(part, self.sizes[order[place]])
        self._images = _Table.of(images, len(self.ids))
        self._annotations = _Table.of(annotations, len(self.ids))
        self._refuse_two_images(annotations)

    def _take_images(
        self, source: AnnotationSource, part: AnnotationPart, at: np.ndarray[Any, Any]
    ) -> None:
        for place, name, size in zip(at.tolist(), part.files, part.sizes, strict=True):
            if self.files[place] not in ("", name):
                what = f"image {self.ids[place]} is {self.files[place]!r}, and {name!r} in "
                raise UserError.at(
                    self.where, f"{what}{source.name}", "give each its own id", code="mismatch"
                )
            if self.files[place] and self.sizes[place].tolist() != size.tolist():
                what = f"image {self.ids[place]} has other sizes in {self._names}"
                raise UserError.at(self.where, what, "correct the wrong file", code="mismatch")
            self.files[place], self.sizes[place] = name, size

    def _refuse(
        self, source: AnnotationSource, rows: np.ndarray[Any, Any], column: int, noun: str
    ) -> None:
        """Refuses annotations of what the file does not list."""
        if not len(rows):
            return
        article = "an" if noun == "image" else "a"
        shown = [f"{row[0]} ({noun} {row[column]})" for row in rows[:SHOWN].tolist()]
        are = "are" if len(rows) > 1 else "is"
        what = (
            f"{source.name}: {len(rows):,} {plural('annotation', len(rows))} {are} of {article} "
            f"{noun} that no file lists: {first_few(shown)}"
        )
        remedy = "use the annotation file that belongs to these images, or correct it"
        raise UserError.at(self.where, what, remedy, code="mismatch")

    def _refuse_two_images(self, annotations: list[np.ndarray[Any, Any]]) -> None:
        """An annotation that two files have must be of one image."""
        table = np.concatenate([rows[:, [1, 0]] for rows in annotations])
        pairs = np.unique(table, axis=0)
        ids, counts = np.unique(pairs[:, 0], return_counts=True)
        if len(different := ids[counts > 1]):
            what = f"annotation {different[0]} is of different images in {self._names}"
            raise UserError.at(
                self.where, what, "prepare sets with equal ids apart", code="mismatch"
            )

    @property
    def _names(self) -> str:
        return " and ".join(source.name for source in self.sources)

    @contextmanager
    def _named(self, source: AnnotationSource) -> Iterator[None]:
        """Turns a ValueError in the block into a UserError that names the file."""
        try:
            yield
        except ValueError as error:
            remedy = "COCO's instances_*.json or person_keypoints_*.json, complete"
            raise UserError.at(
                self.where, f"{source.name}: {error}", remedy, code="damaged-file"
            ) from error


@dataclass(frozen=True)
class _Table:
    """Rows (id, file, offset, length) sorted by image: those of image i are from `starts[i]` on."""

    rows: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]

    @classmethod
    def of(cls, located: list[np.ndarray[Any, Any]], images: int) -> _Table:
        """From rows (image, id, file, offset, length)."""
        rows = np.concatenate(located)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        return cls(rows[:, 1:], np.searchsorted(rows[:, 0], np.arange(images + 1)))


def _located(
    image: np.ndarray[Any, Any], number: int, rows: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Rows (image, id, file, offset, length) of rows (id, offset, length) of a file."""
    file = np.full(len(rows), number)
    return np.column_stack([image, rows[:, 0], file, rows[:, 1:]])


def _outside(part: AnnotationPart, sizes: np.ndarray[Any, Any]) -> Iterator[str]:
    """The annotations whose box no training could learn, and no network find. `sizes` are those of
    their images, int64 [M, 2]."""
    low = part.boxes[:, :2]
    sides = part.boxes[:, 2:]
    beyond = ((low >= sizes) | (low + sides <= 0)).any(1) & (sides != 0).all(1)
    for row in np.flatnonzero(beyond | (sides < 0).any(1)):
        identity, image = part.annotations[row, :2].tolist()
        x, y, width, height = part.boxes[row].tolist()
        yield f"{identity} (image {image}: x {x:g}, y {y:g}, {width:g} x {height:g})"


def unite(mappings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One mapping with the keys of all; raises ValueError if they contradict each other."""
    united = dict(mappings[0])
    for mapping in mappings[1:]:
        for key, value in mapping.items():
            if united.setdefault(key, value) != value:
                name = f"{mapping.get('id')!r}: {key!r}"
                what = f"is {str(united[key])[:80]} and {str(value)[:80]}"
                raise ValueError(f"{name} {what} in different files")
    return united


def _dumped(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"has {str(value)[:60]!r} in place of an object")
    return value


def _read(source: AnnotationSource, progress: Callable[[int], None]) -> AnnotationPart:
    """Reads a file once. Raises ValueError."""
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
            annotation = _mapping(entry.value)
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
    return _mapping(entry.value if text.isascii() else json_entries.parsed(text))


def _whole(mapping: dict[str, Any], noun: str, key: str) -> int:
    value = mapping.get(key)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if type(value) is not int or abs(value) > LARGEST:
        name = f"{noun} {mapping['id']!r}"[:60] if key != "id" and "id" in mapping else f"an {noun}"
        name = name.replace("an category", "a category")
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
