"""Images in class folders."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from distdl.data.encoded import EncodedImages
from distdl.datasets.format import WORK
from distdl.datasets.image_headers import DamagedImage
from distdl.datasets.layout import different_classes, kaggle_below, no_image
from distdl.datasets.left_out import LeftOut
from distdl.domains.domain import View
from distdl.stores.files import read_file
from distdl.stores.walking import ClassFolders, class_names
from distdl.util import unpacking
from distdl.util.errors import Problem, UserError


def check_folder(root: Path, num_classes: int | None) -> Iterable[Problem]:
    """Problems of `root/train/<class>/` and `root/val/<class>/`; paths relative to the data node.

    Args:
        num_classes: How many class folders there should be; None: any number.
    """
    if root.is_file():
        remedy = f"{unpacking.first(root)}name the folder that holds train/ and val/"
        problems = [Problem("root", what=f"{root} is a file", remedy=remedy, code="wrong-kind")]
    elif not root.is_dir():
        problems = [
            Problem(
                "root",
                what=f"no such folder: {root}",
                remedy="data.root=/path/to/images",
                code="not-found",
            )
        ]
    elif (root / WORK).is_dir():
        remedy = "the same `prepare` command resumes it"
        problems = [
            Problem(
                "root",
                what=f"{root}: its preparation was interrupted, or is under way",
                remedy=remedy,
                code="under-way",
            )
        ]
    elif kaggle := kaggle_below(root):
        source = f"prepare imagenet --source {shlex.quote(str(kaggle))}"
        remedy = f"python -m distdl {source} --to OUT, then data.root=OUT"
        problems = [
            Problem(
                "root",
                what=f"{root} is ImageNet as Kaggle has it: val/ has no class folders",
                remedy=remedy,
                code="incomplete",
            )
        ]
    else:
        remedy = "it must hold train/<class>/ and val/<class>/"
        missing = [split for split in ("train", "val") if not (root / split).is_dir()]
        problems = [
            Problem("root", what=f"{root} has no {split}/", remedy=remedy, code="incomplete")
            for split in missing
        ]
    yield from problems
    if problems:
        return
    train, val = class_names(root / "train"), class_names(root / "val")
    if train != val:
        yield different_classes("root", train, val)
    elif not train:
        yield Problem(
            "root", what=f"{root / 'train'} has no class folder", remedy=remedy, code="incomplete"
        )
    if num_classes is not None and num_classes != len(train):
        yield Problem(
            "num_classes",
            what=f"is {num_classes}, but {root / 'train'} has {len(train)} class folders",
            remedy=f"data.num_classes={len(train)}",
            code="mismatch",
        )


def count_up_to(folder: Path, enough: int) -> int:
    """How many images the class folders of a split have; it ends where there are `enough`."""
    folders = ClassFolders(folder.parent, "data.root")
    left_out = LeftOut()
    count = 0
    for name in class_names(folder):
        for inner, _, files in folders.walk(folder, name):
            count += len(left_out.images(inner, files))
            if count >= enough:
                return count
    return count


class FolderImages(EncodedImages):
    """The images in the class folders of a split; see `EncodedImages` for the samples.

    Paths are in one array. In a list of strings, reference counting would gradually copy all
    strings into each worker process.

    Args:
        folder: The split's folder. Subfolders of a class count too, as in torchvision's
            ImageFolder. A folder that several links lead to counts once.
        view: See `distdl.images.views`.
        folders: Shared with the other split, so that a folder belongs to one class only.
        left_out: Counts the files that are no images.

    Raises:
        UserError: A class folder has no image, or a folder belongs to two classes.
        OSError: A folder cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        view: View,
        folders: ClassFolders | None = None,
        left_out: LeftOut | None = None,
    ) -> None:
        super().__init__(view)
        folders = folders or ClassFolders(folder.parent, "data.root")
        left_out = LeftOut() if left_out is None else left_out
        left_out.beside(folder)
        self.folder = folder
        self.classes = class_names(folder)
        paths: list[bytes] = []
        counts: list[int] = []
        for name in self.classes:
            before = len(paths)
            for inner, _, files in sorted(folders.walk(folder, name)):
                prefix = os.fsencode(os.path.join(os.path.relpath(inner, folder), ""))
                images = left_out.images(inner, sorted(files))
                paths += [prefix + os.fsencode(file) for file in images]
            if len(paths) == before:
                raise UserError.at(
                    "data.root", *no_image(folder / name, left_out), code="incomplete"
                )
            counts.append(len(paths) - before)
        self._paths = np.array(paths, dtype=np.bytes_)
        self._labels = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        self.key = self._key()

    def _key(self) -> str:
        """The sha256 of the images' names and labels."""
        listing = hashlib.sha256(str(self.classes).encode(errors="surrogateescape"))
        for array in (self._paths, self._labels):
            listing.update(array.data)
        return listing.hexdigest()

    def __len__(self) -> int:
        return len(self._labels)

    def path(self, index: int) -> Path:
        return self.folder / os.fsdecode(bytes(self._paths[index]))

    def read(self, index: int) -> bytes:
        try:
            return read_file(self.path(index))
        except OSError as error:  # it concerns only this file: a dangling link, no permission
            raise DamagedImage(f"cannot be read: {error.strerror}") from error

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def name(self, index: int) -> str:
        return str(self.path(index))
