"""The annotations of a split in COCO's format: which ones belong to which image.

Only places are kept in memory, 32 bytes of an annotation: its text is read again when it is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from distdl.datasets import json_entries
from distdl.datasets.annotation_files import (
    SHOWN,
    AnnotationPart,
    AnnotationSource,
    as_object,
    read_part,
)
from distdl.util.errors import UserError
from distdl.util.wording import first_few, plural

Progress = Callable[[int, int], None]


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
                parts.append(read_part(source, lambda done: progress(before + done, sum(sizes))))  # noqa: B023
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
        return _dumped(unite([as_object(json_entries.parsed(text)) for text in texts]))

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
            raise UserError.at(
                self.where,
                what=f"{self._names} name two categories {min(twice)!r}",
                remedy="give each category a name of its own",
                code="ambiguous",
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
                    self.where,
                    what=f"{what}{source.name}",
                    remedy="give each its own id",
                    code="mismatch",
                )
            if self.files[place] and self.sizes[place].tolist() != size.tolist():
                raise UserError.at(
                    self.where,
                    what=f"image {self.ids[place]} has other sizes in {self._names}",
                    remedy="correct the wrong file",
                    code="mismatch",
                )
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
        raise UserError.at(
            self.where,
            what=(
                f"{source.name}: {len(rows):,} {plural('annotation', len(rows))} {are} of "
                f"{article} "
                f"{noun} that no file lists: {first_few(shown)}"
            ),
            remedy="use the annotation file that belongs to these images, or correct it",
            code="mismatch",
        )

    def _refuse_two_images(self, annotations: list[np.ndarray[Any, Any]]) -> None:
        """An annotation that two files have must be of one image."""
        table = np.concatenate([rows[:, [1, 0]] for rows in annotations])
        pairs = np.unique(table, axis=0)
        ids, counts = np.unique(pairs[:, 0], return_counts=True)
        if len(different := ids[counts > 1]):
            raise UserError.at(
                self.where,
                what=f"annotation {different[0]} is of different images in {self._names}",
                remedy="prepare sets with equal ids apart",
                code="mismatch",
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
            raise UserError.at(
                self.where,
                what=f"{source.name}: {error}",
                remedy="COCO's instances_*.json or person_keypoints_*.json, complete",
                code="damaged-file",
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
