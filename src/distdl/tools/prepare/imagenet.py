"""ILSVRC2012 as a source: read inside its tar files, without unpacking them.

    ILSVRC2012_img_train.tar   1,000 tars, n01440764.tar ..., of 1,281,167 images
    ILSVRC2012_img_val.tar     50,000 images, ILSVRC2012_val_00000001.JPEG ...

Either may also be unpacked: `train/` with the 1,000 tars, or with 1,000 class folders; `val/` with
the 50,000 images, or with those in class folders.

Two oddities, which distdl detects by content and not by name: n02105855_2933.JPEG is a PNG, and 22
training images are CMYK (https://github.com/cytsai/ilsvrc-cmyk-image-list; both are also listed in
tensorflow/models, research/inception/inception/data/build_imagenet_data.py).
"""

from __future__ import annotations

import argparse
import re
import shlex
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

from distdl.datasets.image_files import EXTENSIONS, is_image
from distdl.datasets.layout import kaggle_below
from distdl.datasets.left_out import NO_IMAGE, LeftOut
from distdl.tools.prepare.source import Files, Progress, Sample, files_below, no_folder
from distdl.util import unpacking
from distdl.util.errors import UserError

DOWNLOADS = "https://image-net.org/challenges/LSVRC/2012/2012-downloads.php"
# Name of the tar, and its MD5 as in torchvision/datasets/imagenet.py.
TARS = {
    "train": ("ILSVRC2012_img_train.tar", "1d675b47d978889d74fa0da5fadfb00e"),
    "val": ("ILSVRC2012_img_val.tar", "29b22e2961454d5413ddabcf34fc5622"),
}
# https://arxiv.org/abs/1409.0575, table 2.
COUNTS = {"classes": 1000, "train": 1_281_167, "val": 50_000}
# Compressed tars cannot be read at a place inside: by their ending, or else by their first bytes.
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
WNID = re.compile(r"n\d{8}")
CHUNK = 1 << 20  # bytes
VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")

# File below the source, offset in the file, length; and the same with the file's mtime (ns).
Location = tuple[str, int, int]
LocationAndMtime = tuple[Location, int]


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "accept other numbers of images than 1,281,167 and 50,000, and of classes than 1,000"
    parser.add_argument("--subset", action="store_true", help=text)


def open_source(options: argparse.Namespace) -> ImageNet:
    return ImageNet(options.source, options.subset)


class ImageNet:
    """Training and validation images of ILSVRC2012. Labels are indices of the sorted wnids.

    `folder` holds the two tars, or their unpacked contents (else UserError). A `subset` may have
    any number of classes and images; validation images of other classes are left out.
    """

    kind = "imagenet"
    in_blocks = False

    def __init__(self, folder: Path, subset: bool = False) -> None:
        self.folder = folder
        self.subset = subset
        self.left_out = LeftOut()
        self.classes: list[str] = []
        self._files = Files(folder)
        self._parts = {split: _part(folder, split) for split in TARS}

    def describe(self) -> dict[str, Any]:
        # Unpacked folders count by name only: the size of a folder means nothing.
        files = {p.name: p.stat().st_size if p.is_file() else None for p in self._parts.values()}
        return {"kind": self.kind, "subset": self.subset, "files": files}

    def read(self, sample: Sample) -> bytes:
        name, offset, length = sample.where
        return self._files.read(str(name), int(offset), int(length), sample.mtime_ns)

    def scan(self, progress: Progress) -> Iterator[Sample]:
        train = [(_wnid(name), name, file) for name, file in self._images("train", progress)]
        train.sort()
        self.classes = sorted({wnid for wnid, _, _ in train})
        labels = {wnid: label for label, wnid in enumerate(self.classes)}
        counts = Counter(classes=len(labels), train=len(train))
        for wnid, name, (where, mtime) in train:
            yield Sample("train", _base(name), labels[wnid], where[2], where, mtime)
        del train
        # No progress here: the validation tar is read within seconds.
        val = [
            (_base(name), name, file)
            for name, file in self._images("val", lambda done, total: None)
        ]
        for base, name, (where, mtime) in sorted(val):
            wnid = val_class(name)
            if wnid in labels:
                counts["val"] += 1
                yield Sample("val", base, labels[wnid], where[2], where, mtime)
            else:
                self.left_out.add(base, "of classes that train/ does not have")
        self._check(counts)

    def _images(self, split: str, progress: Progress) -> Iterator[tuple[str, LocationAndMtime]]:
        """Every image of a split, by its path inside the tar or folder."""
        top = self._parts[split]
        endings = (*EXTENSIONS, ".tar", *COMPRESSED)
        paths = [top] if top.is_file() else [*files_below(top, self.left_out, endings)]
        size = top.stat().st_size
        for number, path in enumerate(paths):
            name = path.relative_to(self.folder).as_posix()
            stat = path.stat()
            if path != top and is_image(name):
                yield name, ((name, 0, stat.st_size), stat.st_mtime_ns)
                progress(number, len(paths))
                continue
            inside = "" if path == top else f"{path.stem}/"
            try:
                with path.open("rb") as file:
                    refuse_compressed(path, file.read(8))
                    tar = _Tar(file, name, path, self.left_out)
                    for inner, where in tar.images(0, stat.st_size, inside):
                        yield inner, (where, stat.st_mtime_ns)
                        if path == top:
                            progress(where[1], size)
            except tarfile.TarError as error:
                known = f" (its MD5 is {TARS[split][1]})" if path.name == TARS[split][0] else ""
                raise UserError.at(
                    "--source",
                    what=f"{path} is damaged: {error}",
                    remedy=f"download it again{known}",
                    code="damaged-file",
                ) from None

    def _check(self, counts: Counter[str]) -> None:
        for split, noun in (("train", "training"), ("val", "validation")):
            if not counts[split]:
                raise UserError.at(
                    "--source",
                    what=f"{self.folder} has no {noun} images of ImageNet",
                    code="incomplete",
                )
        if dict(counts) != COUNTS and not self.subset:
            nouns = {"classes": "classes", "train": "training images", "val": "validation images"}
            what = "; ".join(
                f"{counts[name]:,} {nouns[name]} instead of {wanted:,}"
                for name, wanted in COUNTS.items()
                if counts[name] != wanted
            )
            raise UserError.at(
                "--source",
                what=f"{self.folder} has {what}",
                remedy="download the tars again, or accept these counts: --subset",
                code="mismatch",
            )


def val_class(name: str) -> str:
    """The wnid of a validation image: from the number in its name, else from its folder."""
    match = VAL_NAME.match(_base(name))
    label = val_labels().get(int(match[1])) if match else None
    return label or _wnid(name)


@cache
def val_labels() -> dict[int, str]:
    """The wnid of each of the 50,000 validation images, by the number in its name.

    `imagenet_val.txt` has a line per class: its wnid, then the numbers of its 50 images. The data
    are the devkit's (ILSVRC2012_validation_ground_truth.txt), taken from tensorflow-datasets
    4.9.10, datasets/imagenet2012/validation_labels.txt.
    """
    text = resources.files(__package__).joinpath("imagenet_val.txt").read_text(encoding="ascii")
    lines = (line.split() for line in text.splitlines())
    return {int(number): wnid for wnid, *numbers in lines for number in numbers}


def _part(folder: Path, split: str) -> Path:
    """The tar of a split, or the folder with its unpacked contents."""
    tar = folder / TARS[split][0]
    for path in (tar, folder / tar.stem, folder / split):
        if path.exists():
            return path
    for path in sorted(folder.glob(f"{tar.stem}.t*")):
        refuse_compressed(path)
    if kaggle := kaggle_below(folder):
        raise UserError.at(
            "--source",
            what=f"{folder} holds ImageNet in {kaggle.relative_to(folder)}/, as Kaggle has it",
            remedy=f"--source {shlex.quote(str(kaggle))}",
            code="wrong-kind",
        )
    remedy = f"the tars are available, for research, at {DOWNLOADS}"
    if not folder.is_dir():
        raise UserError(no_folder(folder, remedy))
    raise UserError.at(
        "--source",
        what=f"{folder} holds neither {tar.name} nor {split}/",
        remedy=remedy,
        code="incomplete",
    )


def refuse_compressed(path: Path, head: bytes = b"", inside: str = "") -> None:
    """Raises a UserError if a file, or the tar `inside` it, is compressed: by its name, or by its
    first bytes (`head`)."""
    name = inside or path.name
    if not unpacking.is_compressed(head) and not name.lower().endswith(COMPRESSED):
        return
    if inside:
        what = f"{path} holds {inside}, which is compressed"
        train = shlex.quote(str(path.parent / "train"))
        each = unpacking.command(Path(Path(inside).name), head)
        remedy = f"unpack it into {train}, and there each one, such as: {each}"
    else:
        what = f"{path} is compressed"
        remedy = unpacking.command(path, head)
    raise UserError.at(
        "--source",
        what=f"{what}: images are read at their place in a tar",
        remedy=remedy,
        code="unsupported",
    )


@dataclass(frozen=True)
class _Tar:
    """A tar file, `name` below the source, of which only headers are read."""

    file: BinaryIO
    name: str
    path: Path
    left_out: LeftOut

    def images(self, start: int, end: int, inside: str) -> Iterator[tuple[str, Location]]:
        """Images in the tar from `start` to `end`, and in tars inside it, by their paths below
        `inside`. Raises a TarError if anything in it is neither read nor counted."""
        self.file.seek(start)
        members = 0
        tar = tarfile.TarFile(fileobj=self.file)  # its offsets count from the file's beginning
        for member in tar:
            members += 1
            after = member.offset_data + member.size
            if member.isfile() and not member.issparse() and after > end:
                raise tarfile.ReadError(f"{member.name} ends behind the end of {inside or 'it'}")
            if member.isfile() and member.name.lower().endswith((".tar", *COMPRESSED)):
                self.file.seek(member.offset_data)
                refuse_compressed(self.path, self.file.read(8), member.name)
                inner = f"{Path(member.name).stem}/"
                yield from self.images(member.offset_data, after, inner)
            elif member.issparse():
                self.left_out.add(member.name, "sparse in its tar")
            elif member.isfile() and is_image(member.name):
                yield inside + member.name, (self.name, member.offset_data, member.size)
            elif member.issym() or member.islnk():
                self.left_out.add(member.name, "links inside a tar")
            elif not member.isdir() and not _base(member.name).startswith("."):
                self.left_out.add(member.name, NO_IMAGE)
        if not members:
            self.left_out.add(f"{inside.rstrip('/')}.tar", "empty")
        self._refuse_rest(tar.offset, end, inside)

    def _refuse_rest(self, start: int, end: int, inside: str) -> None:
        """Raises a TarError unless only zeros follow: `tarfile` ends at a damaged header, and at
        the first end of tars that were joined."""
        self.file.seek(start)
        while start < end:
            rest = self.file.read(min(end - start, CHUNK))
            if not rest or rest.count(0) < len(rest):
                what = f"{inside or 'it'} goes on behind its last readable member, at byte {start}"
                raise tarfile.ReadError(what)
            start += len(rest)


def _wnid(name: str) -> str:
    """The class of an image: the folder or tar that it is in."""
    wnid = Path(name).parent.name
    if not WNID.fullmatch(wnid):
        raise UserError.at(
            "--source",
            what=f"{name} is not in the tar or folder of a class (n01440764.tar or n01440764/)",
            remedy="for other images: prepare folder",
            code="incomplete",
        )
    return wnid


def _base(name: str) -> str:
    return name.rpartition("/")[2]
