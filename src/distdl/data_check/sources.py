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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distdl.datasets import parquet, tfrecord
from distdl.datasets.folder import Folder
from distdl.datasets.format import MANIFEST, WORK, load_index
from distdl.datasets.reading import DataSet, open_data_set, refuse_misfit
from distdl.datasets.source import Files, Sample
from distdl.stores import Store, StoreError, is_remote, open_store
from distdl.stores.files import readable
from distdl.util.errors import Problem, UserError

Array = np.ndarray[Any, Any]

PATIENCE = 10.0  # seconds: a user is waiting for the answer
# Raw data that needs `prepare` first, by the names of files in the folder.
RAW = {
    "imagenet": r"^ILSVRC2012_img_\w+\.tar$",
    "tfrecord": tfrecord.FILES,
    "parquet": parquet.FILES,
}


@dataclass
class SplitImages:
    """One split.

    Args:
        labels: [N].
        sizes: [N], bytes of each encoded image.
        files: Number of files.
        where: [N] rows of `ROW`, or the samples of a folder.
        names: Of the shards; empty for a folder.
    """

    labels: Array
    sizes: Array
    files: int
    where: Any
    names: Sequence[str] = ()


@dataclass
class ImageReader:
    """Reads images from files on this machine.

    Args:
        images: The images.
        folder: Where the files are.
    """

    images: SplitImages
    folder: Path
    _files: Files = field(init=False)

    def __post_init__(self) -> None:
        self._files = Files(self.folder)

    def read(self, index: int) -> bytes:
        """The encoded image; raises OSError if it cannot be read."""
        name, offset, size = self.place(index)
        if self.images.names:
            return self._files.read(name, offset, size)
        return (self.folder / name).read_bytes()

    def place(self, index: int) -> tuple[str, int, int]:
        """File, offset and size of an image, in bytes."""
        row = self.images.where[index]
        if isinstance(row, Sample):
            return str(row.where[0]), 0, row.bytes
        return self.images.names[row["shard"]], int(row["offset"]), int(row["bytes"])

    def name(self, index: int) -> str:
        """Location for messages: the file, or shard and member as `tar` shows them."""
        file, offset, _ = self.place(index)
        if not self.images.names:
            return file
        header = self._files.read(file, offset - 512, 100)
        return f"{file}:{header.rstrip(bytes(1)).decode('utf-8', 'replace')}"

    def sha256(self, index: int) -> bytes | None:
        row = self.images.where[index]
        return None if isinstance(row, Sample) else bytes(row["sha256"])

    def part(self, indices: Sequence[int]) -> ImageReader:
        """A reader of only those images, small enough to be pickled to another process."""
        images = self.images
        where = [images.where[int(index)] for index in indices]
        if images.names:
            where = images.where[indices]
        kept = SplitImages(images.labels[:0], images.sizes[:0], 0, where, images.names)
        return ImageReader(kept, self.folder)

    def forget(self, indices: Sequence[int]) -> None:
        """Drops images from the page cache, so that the next read comes from the disk."""
        if not hasattr(os, "posix_fadvise"):
            return
        for index in indices:
            name, offset, size = self.place(index)
            with suppress(OSError), (self.folder / name).open("rb") as file:
                os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)


@dataclass
class DataAtUri:
    """The data set at a URI.

    Args:
        uri: For messages.
        kind: "shards", "shards in a store" or "folders of images".
        classes: Their names.
        splits: By name.
        store: Source of its files; None: they are on this machine.
        folder: Location of the files on this machine.
    """

    uri: str
    kind: str
    classes: Sequence[str]
    splits: dict[str, SplitImages]
    store: Store | None = None
    folder: Path = Path()
    # Totals of the downloads from a store.
    downloaded_bytes: int = 0
    download_seconds: float = 0.0

    @property
    def count(self) -> int:
        """Number of images in all splits."""
        return sum(len(images.labels) for images in self.splits.values())

    @contextmanager
    def reading(self, images: SplitImages, shard: int | None) -> Iterator[ImageReader]:
        """A reader of one shard, or of a whole split if it is on this machine.

        Args:
            images: The split.
            shard: From a store: its number; ignored for files on this machine.

        Raises:
            StoreError: The shard cannot be downloaded.
        """
        if self.store is None:
            yield ImageReader(images, self.folder)
            return
        assert shard is not None
        with tempfile.TemporaryDirectory(prefix="distdl-check-") as folder:
            name, start = images.names[shard], time.perf_counter()
            self.store.download(name, Path(folder, name))
            self.download_seconds += time.perf_counter() - start
            self.downloaded_bytes += Path(folder, name).stat().st_size
            yield ImageReader(images, Path(folder))


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
        raise UserError.at(uri.partition("?")[0], str(error), error.remedy) from error
    except UserError as error:  # its path is a run's data.root, which does not apply here
        problems = (Problem("", p.what, p.remedy) for p in error.problems if p.path == "data.root")
        raise (UserError(*found) if (found := list(problems)) else error) from error


def _shards(data: DataSet, remote: bool) -> DataAtUri:
    store, splits = data.store, {}
    for name, split in data.manifest.splits.items():
        content = store.read(split.index.name)
        if hashlib.sha256(content).hexdigest() != split.index.sha256:
            what = f"{split.index.name} is not the index that {MANIFEST} speaks of"
            raise UserError.at(store.uri, what, "copy or upload the data set again")
        rows = load_index(content, f"{store.uri}/{split.index.name}")
        refuse_misfit(rows, data, name)
        names = [shard.name for shard in split.shards]
        for shard in () if remote else split.shards:
            size = store.size(shard.name)
            if size != shard.bytes:
                state = "is missing" if size is None else f"has {size} of {shard.bytes} bytes"
                raise UserError.at(store.uri, f"{shard.name} {state}", "copy it again")
        splits[name] = SplitImages(rows["label"], rows["bytes"], len(names), rows, names)
    kind = "shards in a store" if remote else "shards"
    folder = Path() if remote else Path(store.uri)
    classes = data.manifest.classes
    return DataAtUri(store.uri, kind, classes, splits, store if remote else None, folder)


def _folder(folder: Path) -> DataAtUri:
    if folder.is_file():
        what = "is a file: give the folder that holds train/ and val/, or dataset.json"
        raise UserError.at(str(folder), what)
    if not folder.is_dir():
        raise UserError.at(str(folder), "no such folder")
    if (folder / WORK).is_dir():
        what = "its preparation was interrupted, or is under way"
        raise UserError.at(str(folder), what, "the same `prepare` command resumes it")
    if not (folder / "train").is_dir():
        names = [path.name for path in folder.iterdir()]
        found = (kind for kind, form in RAW.items() if any(re.search(form, n) for n in names))
        raw = next(found, None)
        what = f"neither {MANIFEST} nor train/ and val/ are in it"
        remedy = "it must hold train/<class>/ and val/<class>/"
        if raw:
            remedy = f"python -m distdl prepare {raw} --source {shlex.quote(str(folder))} --to OUT"
        raise UserError.at(str(folder), what, remedy)
    try:
        source = Folder(folder)
        samples = list(source.scan(lambda done, total: None))
    except UserError as error:
        problems = (Problem(str(folder), p.what, p.remedy) for p in error.problems)
        raise UserError(*problems) from error
    splits = {}
    for name in ("train", "val"):
        own = [sample for sample in samples if sample.split == name]
        labels, sizes = (np.array([getattr(s, key) for s in own]) for key in ("label", "bytes"))
        splits[name] = SplitImages(labels, sizes, len(own), own)
    return DataAtUri(str(folder), "folders of images", source.classes, splits, folder=folder)
