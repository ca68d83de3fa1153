"""A folder of images as a source: `train/<class>/*.jpg` and `val/<class>/*.jpg`."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from distdl.datasets.image_files import EXTENSIONS
from distdl.datasets.source import Progress, Sample, files_below, no_folder, refuse_changed
from distdl.stores.walking import ClassFolders, class_names
from distdl.util.errors import Problem, UserError

SPLITS = ("train", "val")


def add_options(parser: argparse.ArgumentParser) -> None:
    pass


def open_source(options: argparse.Namespace) -> Folder:
    return Folder(options.source)


class Folder:
    """Images in class folders. Labels index the sorted names, as in torchvision's ImageFolder.

    `folder` holds `train/` and `val/`, with the same class folders in both, none without images
    (else UserError).
    """

    kind = "folder"
    in_blocks = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        missing = [split for split in SPLITS if not (folder / split).is_dir()]
        if missing:
            what = f"{folder} has no {' and no '.join(f'{split}/' for split in missing)}"
            remedy = "it must hold train/<class>/ and val/<class>/"
            raise UserError.at("--source", what if folder.is_dir() else no_folder(folder), remedy)
        self.classes, val = class_names(folder / "train"), class_names(folder / "val")
        if self.classes != val:
            raise UserError(different_classes("--source", self.classes, val))

    @cached_property
    def _images(self) -> list[Sample]:
        samples, folders = [], ClassFolders(self.folder, "--source")
        for split in SPLITS:
            for label, name in enumerate(self.classes):
                top = self.folder / split / name
                walk = folders.walk(self.folder / split, name)
                images = [(path, *_size_and_mtime(path)) for path in files_below(top, walk=walk)]
                if not images:
                    endings = f"names end in {', '.join(EXTENSIONS)}"
                    raise UserError.at("--source", f"{top} holds no image", endings)
                for path, size, mtime in images:
                    where = path.relative_to(self.folder).as_posix()
                    inner = path.relative_to(top).as_posix()
                    # The class makes keys unique: many data sets number each class's images from 1.
                    key = inner if inner.startswith(name) else f"{name}_{inner}"
                    samples.append(Sample(split, key, label, size, (where,), mtime))
        return samples

    def describe(self) -> dict[str, Any]:
        listing = hashlib.sha256()
        for sample in self._images:
            listing.update(f"{sample.where[0]} {sample.bytes}\n".encode(errors="surrogateescape"))
        size = sum(sample.bytes for sample in self._images)
        counts = {"kind": self.kind, "images": len(self._images), "bytes": size}
        return counts | {"listing_sha256": listing.hexdigest()}

    def scan(self, progress: Progress) -> Iterator[Sample]:
        for number, sample in enumerate(self._images):
            yield sample
            progress(number, len(self._images))

    def read(self, sample: Sample) -> bytes:
        path = self.folder / str(sample.where[0])
        with path.open("rb") as file:
            data = file.read()
            refuse_changed(path, os.fstat(file.fileno()), sample.mtime_ns, sample.bytes)
        return data

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the list of all images, which would be copied to each process."""
        return {"folder": self.folder, "classes": self.classes}


def different_classes(path: str, train: Sequence[str], val: Sequence[str]) -> Problem:
    """The problem of a `path` whose two splits have different class folders."""
    differing = sorted(set(train) ^ set(val))
    names = f"{', '.join(differing[:3])}{', ...' * (len(differing) > 3)}"
    what = f"train/ has {len(train)} classes and val/ {len(val)}; only one of the two has {names}"
    remedy = "both need the same class folders, or labels would differ in meaning"
    return Problem(path, what, remedy)


def _size_and_mtime(path: Path) -> tuple[int, int]:
    """Size and mtime; 0 for an unreadable file (a dangling link), which `read` reports later."""
    try:
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns
    except OSError:
        return 0, 0
