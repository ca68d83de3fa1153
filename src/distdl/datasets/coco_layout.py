"""Where the annotation files and images of a data set in COCO's format lie.

annotations/instances_train2017.json     or in annotations_trainval2017.zip
annotations/image_info_test2017.json     without annotations, or in image_info_test2017.zip
train2017/000000391895.jpg               or in train2017.zip, or below images/
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from distdl.datasets import zips
from distdl.datasets.annotation_files import AnnotationSource
from distdl.datasets.format import SPLITS
from distdl.datasets.zips import ZipMember
from distdl.stores.files import read_file
from distdl.util.errors import UserError

# labels, split, and the rest of the name of an image folder: instances, train, 2017.
NAME = re.compile(r"(?:(\w+?)_)?(train|val|test)(?:idation)?(\d*)\.json")
WITHOUT_LABELS = "image_info"
LABELS = ("instances",)
PIECE = 8 << 20


@dataclass(frozen=True)
class AnnotationFile:
    """A JSON file, or such a `member` of a zip."""

    path: Path
    member: str = ""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    @property
    def bytes(self) -> int:
        if not self.member:
            return self.path.stat().st_size
        with zipfile.ZipFile(self.path) as archive:
            return archive.getinfo(self.member).file_size


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split; `images` are folders and zips, which are searched in this order."""

    annotations: Sequence[AnnotationFile]
    images: Sequence[Path]


def find(
    root: Path,
    where: str,
    labels: Sequence[str] = LABELS,
    annotations: Mapping[str, Sequence[str]] | None = None,
    images: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, SplitFiles]:
    """The files of each split that a folder holds.

    Args:
        where: The path of a Problem.
        labels: What the names of annotation files begin with.
        annotations: The annotation files of a split, relative to `root`; of other splits they are
            found by their names.
        images: The image folders and zips of a split, likewise.

    Raises:
        UserError: A file that is named is missing, or names leave open which one is meant.
    """
    listed = [*_listed(root)]
    splits = {}
    for split in SPLITS:
        named = (annotations or {}).get(split)
        if named:
            files = [_named(root, name, where) for name in named]
        else:
            files = _by_name(listed, split, labels, where)
        if files:
            places = (images or {}).get(split)
            if places:
                found = [_existing(root / place, where) for place in places]
            else:
                found = _places(root, files)
            splits[split] = SplitFiles(files, found)
    return splits


def looks_like(root: Path) -> bool:
    """Whether a folder holds annotation files of COCO's names."""
    return root.is_dir() and any(NAME.fullmatch(_base(file)) for file in _listed(root))


def _listed(root: Path) -> Iterator[AnnotationFile]:
    for folder in (root / "annotations", root):
        if folder.is_dir():
            yield from (AnnotationFile(path) for path in sorted(folder.glob("*.json")))
    for path in sorted(root.glob("*.zip")):
        if path.name.startswith(("annotations", WITHOUT_LABELS)):
            try:
                with zipfile.ZipFile(path) as archive:
                    names = sorted(archive.namelist())
            except zipfile.BadZipFile:
                continue  # named when it is used, or when nothing else is found
            yield from (AnnotationFile(path, name) for name in names if name.endswith(".json"))


def _base(file: AnnotationFile) -> str:
    return (file.member or file.path.name).rpartition("/")[2]


def _by_name(
    listed: Sequence[AnnotationFile], split: str, labels: Sequence[str], where: str
) -> list[AnnotationFile]:
    files: list[AnnotationFile] = []
    for label in (*labels, WITHOUT_LABELS) if split == "test" else labels:
        found: dict[str, AnnotationFile] = {}
        for file in listed:
            match = NAME.fullmatch(_base(file))
            if match and match[1] == label and match[2] == split:
                found.setdefault(_base(file), file)  # an unpacked one comes before a zip's
        if len(found) > 1:
            raise UserError.at(
                where,
                what=f"has {' and '.join(sorted(found))}: which one is meant?",
                remedy=f"name the annotation file of {split}",
                code="ambiguous",
            )
        files += found.values()
        if files and label == labels[-1]:
            break
    return files


def _named(root: Path, name: str, where: str) -> AnnotationFile:
    """A file, or "ZIP:MEMBER"."""
    path, colon, member = name.partition(".zip:")
    if not colon:
        return AnnotationFile(_existing(root / name, where))
    file = AnnotationFile(_existing(root / f"{path}.zip", where), member)
    if member not in zips.members(file.path, where):
        raise UserError.at(where, what=f"{file.path} holds no {member}", code="incomplete")
    return file


def _existing(path: Path, where: str) -> Path:
    if not path.exists():
        raise UserError.at(where, what=f"no such file or folder: {path}", code="not-found")
    return path


def _places(root: Path, files: Sequence[AnnotationFile]) -> list[Path]:
    """Image folders and zips by the names of the annotation files; if there are none, all."""
    places: list[Path] = []
    for file in files:
        match = NAME.fullmatch(_base(file))
        names = [f"{match[2]}{match[3]}", match[2]] if match else []
        for name in names:
            tried = (root / name, root / "images" / name, root / f"{name}.zip")
            places += [path for path in tried if path.exists() and path not in places]
    if places:
        return places
    archives = [p for p in sorted(root.glob("*.zip")) if not p.name.startswith("annotations")]
    return [path for path in (root / "images", root) if path.is_dir()] + archives


@contextmanager
def opened(files: Sequence[AnnotationFile], where: str) -> Iterator[list[AnnotationSource]]:
    """The files, for `distdl.datasets.coco.Annotations`. One in a zip is unpacked into a temporary
    file, which the system removes when it is closed, also after a kill."""
    sources: list[AnnotationSource] = []
    try:
        for file in files:
            sources.append(AnnotationSource(file.name, _open(file, where)))
        yield sources
    finally:
        for source in sources:
            source.file.close()


def _open(file: AnnotationFile, where: str) -> BinaryIO:
    if not file.member:
        return file.path.open("rb")
    try:
        with zipfile.ZipFile(file.path) as archive, archive.open(file.member) as packed:
            free = shutil.disk_usage(tempfile.gettempdir()).free
            if archive.getinfo(file.member).file_size > free:
                raise UserError.at(
                    where,
                    what=f"{tempfile.gettempdir()} has no room for {file.name}, unpacked",
                    remedy="set TMPDIR to a larger disk, or unzip it yourself",
                    code="incomplete",
                )
            unpacked = tempfile.TemporaryFile()  # noqa: SIM115
            shutil.copyfileobj(packed, unpacked, PIECE)
            return unpacked
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError) as error:
        raise UserError.at(
            where,
            what=f"{file.name} cannot be read: {error}",
            remedy="download the zip again",
            code="unreadable",
        ) from error


@dataclass(frozen=True)
class Found:
    """Where an image is: the number of its place, and its name there; in a zip its member."""

    place: int
    name: str
    bytes: int
    mtime_ns: int
    member: ZipMember | None = None


class Images:
    """The images of one split, in folders and zips."""

    def __init__(self, places: Sequence[Path], where: str) -> None:
        self.places = list(places)
        self.where = where

    def find(self, name: str) -> Found | None:
        """Where an image is, by the name in its annotation file; None: nowhere."""
        for number, place in enumerate(self.places):
            short = name.removeprefix(f"{place.stem}/")
            if place.is_dir():
                for each in dict.fromkeys((name, short)):
                    try:
                        stat = (place / each).stat()
                    except OSError:
                        continue
                    return Found(number, each, stat.st_size, stat.st_mtime_ns)
            else:
                held, mtime = self._zips[number]
                for each in dict.fromkeys((name, f"{place.stem}/{name}", short)):
                    if each in held:
                        member = held[each]
                        return Found(number, each, member.bytes, mtime, member)
        return None

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those that `find` does not find. Folders are listed once, and not asked for each name."""
        held = [
            {
                os.path.relpath(os.path.join(inner, file), place)
                for inner, _, files in os.walk(place, followlinks=True)
                for file in files
            }
            if place.is_dir()
            else set(self._zips[number][0])
            for number, place in enumerate(self.places)
        ]
        lost = []
        for name in names:
            for place, its in zip(self.places, held, strict=True):
                if its & {name, name.removeprefix(f"{place.stem}/"), f"{place.stem}/{name}"}:
                    break
            else:
                lost.append(name)
        return [name for name in lost if self.find(name) is None]

    def shown(self, found: Found) -> str:
        """Where an image is, for messages."""
        place = self.places[found.place]
        return f"{place}:{found.name}" if found.member else str(place / found.name)

    @cached_property
    def _zips(self) -> dict[int, tuple[dict[str, ZipMember], int]]:
        return {
            number: (zips.members(place, self.where), place.stat().st_mtime_ns)
            for number, place in enumerate(self.places)
            if not place.is_dir()
        }

    def read(self, found: Found) -> bytes:
        """Raises OSError or ValueError."""
        if found.member is None:
            return read_file(self.places[found.place] / found.name)
        with self.places[found.place].open("rb") as file:

            def read_at(offset: int, length: int) -> bytes:
                file.seek(offset)
                return file.read(length)

            return zips.read(read_at, found.member)
