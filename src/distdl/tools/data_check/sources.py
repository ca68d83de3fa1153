"""Finds the data set at a URI, and reads its images one by one."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from distdl.datasets import coco_layout
from distdl.datasets.format import MANIFEST, WORK, load_index
from distdl.datasets.image_headers import MOST_PIXELS
from distdl.datasets.layout import kaggle_below
from distdl.datasets.reading import DataSet, open_data_set, refuse_misfit
from distdl.domains.detection.categories import Categories
from distdl.domains.detection.record import DetectionRecord
from distdl.stores import Store, StoreError, is_remote, open_store
from distdl.stores.files import read_file, readable, regular
from distdl.tools.prepare import parquet, tfrecord
from distdl.tools.prepare.coco import Coco
from distdl.tools.prepare.folder import Folder
from distdl.tools.prepare.source import Files, Sample
from distdl.util import unpacking
from distdl.util.errors import UserError

Array = np.ndarray[Any, Any]

PATIENCE = 10.0  # seconds: a user is waiting for the answer
# Raw data that needs `prepare` first, by the names of files in the folder.
RAW = {
    "imagenet": r"^ILSVRC2012_img_\w+\.t",
    "tfrecord": tfrecord.FILES,
    "parquet": parquet.FILES,
}


@dataclass
class SplitImages:
    """One split of N images."""

    labels: Array  # [N]
    sizes: Array  # [N], bytes of each encoded image
    files: int  # number of files
    where: Any  # [N] rows of `ROW`, or the samples of a folder
    names: Sequence[str] = ()  # of the shards; empty for a folder


@dataclass
class ImageReader:
    """Reads images from files in a folder of this machine."""

    images: SplitImages
    folder: Path
    max_pixels: int = MOST_PIXELS  # an image with more counts as damaged
    categories: Categories | None = None  # of records in the shards; None: there are none

    @cached_property
    def _files(self) -> Files:
        return Files(self.folder)

    def read(self, index: int) -> bytes:
        """The encoded image; raises OSError if it cannot be read."""
        name, offset, size = self.location(index)
        if self.images.names:
            return self._files.read(name, offset, size)
        return read_file(self.folder / name)

    def location(self, index: int) -> tuple[str, int, int]:
        """File, offset and size of an image, in bytes."""
        row = self.images.where[index]
        if isinstance(row, Sample):
            return str(row.where[0]), 0, row.bytes
        return self.images.names[row["shard"]], int(row["offset"]), int(row["bytes"])

    def name(self, index: int) -> str:
        """Location for messages: the file, or shard and member as `tar` shows them."""
        file, offset, _ = self.location(index)
        if not self.images.names:
            return file
        header = self._files.read(file, offset - 512, 100)
        return f"{file}:{header.rstrip(bytes(1)).decode('utf-8', 'replace')}"

    def sha256(self, index: int) -> bytes | None:
        row = self.images.where[index]
        return None if isinstance(row, Sample) else bytes(row["sha256"])

    def record(self, index: int) -> bytes:
        """The record beside an image. Raises OSError, or ValueError if it is damaged."""
        row = self.images.where[index]
        name = self.images.names[row["shard"]]
        data = self._files.read(name, int(row["record_offset"]), int(row["record_bytes"]))
        if hashlib.sha256(data).digest() != row["record_sha256"].tobytes():
            raise ValueError("its bytes are not those of the index (sha256)")
        return data

    def part(self, indices: Sequence[int]) -> ImageReader:
        """A reader of only those images, small enough to be pickled to another process."""
        where = self.images.where
        empty = np.empty(0)
        where = where[indices] if self.images.names else [where[int(i)] for i in indices]
        part = SplitImages(empty, empty, 0, where, self.images.names)
        return replace(self, images=part)

    def forget(self, indices: Sequence[int]) -> None:
        """Drops images from the page cache, so that the next read comes from the disk."""
        for index in indices if hasattr(os, "posix_fadvise") else ():
            name, offset, size = self.location(index)
            with suppress(OSError), regular(self.folder / name) as file:
                os.posix_fadvise(file, offset, size, os.POSIX_FADV_DONTNEED)


@dataclass
class CocoReader(ImageReader):
    """Reads the images of a folder in COCO's format."""

    source: Coco | None = None

    def read(self, index: int) -> bytes:
        assert self.source is not None
        return self.source.read(self.images.where[index])

    def name(self, index: int) -> str:
        return str(self.images.where[index].name)

    def forget(self, indices: Sequence[int]) -> None:
        """They stay: some are in zips."""


@dataclass
class DataAtUri:
    """The data set at a URI.

    Args:
        kind: "shards", "shards in a store" or "folders of images".
        store: Source of its files; None: they are in `folder`, on this machine.
        max_pixels: An image with more counts as damaged.
        left_out: Lines about files that are no images.
        categories: Of a detection set; None: images with labels.
        coco: What a folder in COCO's format holds; its annotations have been looked at.
    """

    uri: str
    kind: str
    classes: Sequence[str]
    splits: dict[str, SplitImages]
    store: Store | None = None
    folder: Path = Path()
    max_pixels: int = MOST_PIXELS
    left_out: Sequence[str] = ()
    # Of a detection set.
    categories: Categories | None = None
    coco: Coco | None = None
    # Totals of the downloads from a store.
    downloaded_bytes: int = 0
    download_seconds: float = 0.0

    @property
    def count(self) -> int:
        """Number of images in all splits."""
        return sum(len(images.labels) for images in self.splits.values())

    @contextmanager
    def reading(self, images: SplitImages, shard: int | None) -> Iterator[ImageReader]:
        """A reader of a split on this machine, or of one shard, which is downloaded (StoreError).

        `shard` is ignored for files on this machine.
        """
        if self.coco is not None:
            yield CocoReader(images, self.folder, self.max_pixels, source=self.coco)
            return
        if self.store is None:
            yield ImageReader(images, self.folder, self.max_pixels, self.categories)
            return
        assert shard is not None
        with tempfile.TemporaryDirectory(prefix="distdl-check-") as folder:
            name = images.names[shard]
            start = time.perf_counter()
            self.store.download(name, Path(folder, name))
            self.download_seconds += time.perf_counter() - start
            self.downloaded_bytes += Path(folder, name).stat().st_size
            yield ImageReader(images, Path(folder), self.max_pixels, self.categories)


def find(uri: str) -> DataAtUri:
    """Reads the manifest and the indexes at a URI, or the names in a folder.

    Raises:
        UserError: There is no data set that can be trained on.
    """
    remote = is_remote(uri)
    if not remote:
        folder = Path(open_store(uri).uri)
        with readable(uri):
            if not (folder / MANIFEST).exists():
                return _folder(folder)
    try:
        return _shards(open_data_set(uri, patience=PATIENCE), remote)
    except StoreError as error:
        where = uri.partition("?")[0]
        raise UserError.at(where, what=str(error), remedy=error.remedy, code=error.code) from error
    except UserError as error:  # its path is a run's data.root, which does not apply here
        if any(problem.path != "data.root" for problem in error.problems):
            raise
        raise UserError(*(replace(problem, path="") for problem in error.problems)) from error


def _shards(data: DataSet, remote: bool) -> DataAtUri:
    store = data.store
    splits = {}
    for name, split in data.manifest.splits.items():
        content = store.read(split.index.name)
        if hashlib.sha256(content).hexdigest() != split.index.sha256:
            raise UserError.at(
                store.uri,
                what=f"{split.index.name} is not the index that {MANIFEST} describes",
                remedy="copy or upload the data set again",
                code="wrong-kind",
            )
        rows = load_index(content, f"{store.uri}/{split.index.name}", data.manifest.row)
        refuse_misfit(rows, data, name)
        names = [shard.name for shard in split.shards]
        for shard in () if remote else split.shards:
            size = store.size(shard.name)
            if size != shard.bytes:
                state = "is missing" if size is None else f"has {size} of {shard.bytes} bytes"
                raise UserError.at(
                    store.uri,
                    what=f"{shard.name} {state}",
                    remedy="copy it again",
                    code="incomplete",
                )
        splits[name] = SplitImages(rows["label"], rows["bytes"], len(names), rows, names)
    classes = data.manifest.classes
    if remote:
        found = DataAtUri(store.uri, "shards in a store", classes, splits, store)
    else:
        found = DataAtUri(store.uri, "shards", classes, splits, folder=Path(store.uri))
    if data.manifest.domain == DetectionRecord.domain:
        found.categories = Categories.of(data.manifest.categories)
    return found


def _folder(folder: Path) -> DataAtUri:
    remedy = ""
    if folder.is_file():
        what = "is a file"
        remedy = unpacking.first(folder)
        remedy += "give the folder that holds train/ and val/, or dataset.json"
    elif not folder.is_dir():
        what = "no such folder"
    elif (folder / WORK).is_dir():
        what = "its preparation was interrupted, or is under way"
        remedy = "the same `prepare` command resumes it"
    else:
        what = f"holds neither {MANIFEST} nor train/ and val/"
        remedy = "it must hold train/<class>/ and val/<class>/"
        if kaggle := kaggle_below(folder):
            quoted = shlex.quote(str(kaggle))
            remedy = f"python -m distdl prepare imagenet --source {quoted} --to OUT"
        names = "\n".join(path.name for path in folder.iterdir())
        for kind, form in RAW.items():
            if re.search(form, names, re.MULTILINE):
                quoted = shlex.quote(str(folder))
                remedy = f"python -m distdl prepare {kind} --source {quoted} --to OUT"
                break
    if not (folder / WORK).is_dir() and coco_layout.looks_like(folder):
        return _coco(folder)
    if (folder / WORK).is_dir() or not (folder / "train").is_dir():
        raise UserError.at(str(folder), what=what, remedy=remedy, code="incomplete")
    try:
        source = Folder(folder)
        samples = list(source.scan(lambda done, total: None))
    except UserError as error:
        raise UserError(*(replace(p, path=str(folder)) for p in error.problems)) from error
    splits = {}
    for name in ("train", "val"):
        chosen = [sample for sample in samples if sample.split == name]
        labels, sizes = (np.array([getattr(s, key) for s in chosen]) for key in ("label", "bytes"))
        splits[name] = SplitImages(labels, sizes, len(chosen), chosen)
    data = DataAtUri(str(folder), "folders of images", source.classes, splits, folder=folder)
    data.left_out = source.left_out.lines()
    return data


def _coco(folder: Path) -> DataAtUri:
    """A folder in COCO's format; its annotations are looked at, its images are not."""
    try:
        source = Coco(folder, coco_layout.find(folder, "--source"), None, skip_damaged=True)
        samples = list(source.scan(lambda done, total: None))
    except UserError as error:
        raise UserError(*(replace(p, path=str(folder)) for p in error.problems)) from error
    splits = {}
    for name in source.splits:
        chosen = [sample for sample in samples if sample.split == name]
        sizes = np.array([sample.bytes for sample in chosen])
        splits[name] = SplitImages(np.zeros(len(chosen), np.int64), sizes, len(chosen), chosen)
    data = DataAtUri(str(folder), "a folder in COCO's format", source.classes, splits)
    data.categories = Categories.of(source.categories)
    data.coco = source
    return data
