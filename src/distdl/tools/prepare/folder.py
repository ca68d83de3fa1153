"""A folder of images as a source: `train/<class>/*.jpg` and `val/<class>/*.jpg`."""

from __future__ import annotations

import argparse
import hashlib
import shlex
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from distdl.datasets.layout import different_classes, kaggle_below, no_image
from distdl.datasets.left_out import LeftOut
from distdl.stores.files import read_file
from distdl.stores.walking import ClassFolders, class_names
from distdl.tools.prepare.source import Progress, Sample, no_folder, refuse_changed
from distdl.util import unpacking
from distdl.util.errors import UserError

SPLITS = ("train", "val")


def add_options(parser: argparse.ArgumentParser) -> None:
    pass


def open_source(options: argparse.Namespace) -> Folder:
    return Folder(options.source, partial=options.append)


class Folder:
    """Images in class folders. Labels index the sorted names, as in torchvision's ImageFolder.

    `folder` holds `train/` and `val/`, with the same class folders in both, none without images
    (else UserError). If `partial`, one of the two is enough.
    """

    kind = "folder"
    in_blocks = False

    def __init__(self, folder: Path, partial: bool = False) -> None:
        self.folder = folder
        self.left_out = LeftOut()
        self.splits = [split for split in SPLITS if (folder / split).is_dir()]
        missing = [split for split in SPLITS if split not in self.splits]
        if missing and not (partial and self.splits):
            what = f"{folder} has no {' and no '.join(f'{split}/' for split in missing)}"
            remedy = "it must hold train/<class>/ and val/<class>/"
            if not folder.is_dir():
                raise UserError(no_folder(folder, unpacking.first(folder) + remedy))
            raise UserError.at("--source", what=what, remedy=remedy, code="incomplete")
        self.classes = class_names(folder / self.splits[0])
        val = class_names(folder / self.splits[-1])
        if not val and (kaggle := kaggle_below(folder)):
            source = f"--source {shlex.quote(str(kaggle))}"
            raise UserError.at(
                "--source",
                what=f"{folder} is ImageNet as Kaggle has it: val/ has no class folders",
                remedy=f"prepare imagenet {source}",
                code="incomplete",
            )
        if self.classes != val:
            raise UserError(different_classes("--source", self.classes, val))
        if not self.classes:
            raise UserError.at(
                "--source",
                what=f"{folder / 'train'} has no class folder",
                remedy="it must hold train/<class>/ and val/<class>/",
                code="incomplete",
            )

    @cached_property
    def _images(self) -> list[Sample]:
        samples = []
        folders = ClassFolders(self.folder, "--source")
        for split in self.splits:
            self.left_out.beside(self.folder / split)
            for label, name in enumerate(self.classes):
                top = self.folder / split / name
                paths = [
                    Path(inner, file)
                    for inner, _, files in folders.walk(self.folder / split, name)
                    for file in self.left_out.images(inner, sorted(files))
                ]
                if not paths:
                    raise UserError.at("--source", *no_image(top, self.left_out), code="incomplete")
                for path in paths:
                    size, mtime = _size_and_mtime(path)
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
        data = read_file(path)
        refuse_changed(path, path.stat(), sample.mtime_ns, sample.bytes)
        return data

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the list of all images, which would be copied to each process."""
        return {"folder": self.folder, "classes": self.classes}


def _size_and_mtime(path: Path) -> tuple[int, int]:
    """Size and mtime; 0 for an unreadable file (a dangling link), which `read` reports later."""
    try:
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns
    except OSError:
        return 0, 0
