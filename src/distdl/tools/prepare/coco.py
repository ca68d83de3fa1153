"""COCO, or a set in its format, as a source: annotation files (JSON), images in folders or zips.

    annotations/instances_train2017.json    or annotations_trainval2017.zip, as it was downloaded
    annotations/instances_val2017.json
    annotations/image_info_test2017.json    images without annotations: they can be predicted
    train2017/, val2017/, test2017/         or train2017.zip, val2017.zip, test2017.zip

Nothing is unpacked. Files of other names: --train, --val, --test, and --train-images, ...
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from distdl.datasets import coco_layout, zips
from distdl.datasets.coco import Annotations
from distdl.datasets.coco_layout import Images, SplitFiles
from distdl.datasets.format import SPLITS, WORK
from distdl.datasets.left_out import LeftOut
from distdl.datasets.reading import Shards, open_data_set
from distdl.datasets.zips import ZipMember
from distdl.domains.detection import record as records
from distdl.domains.detection.categories import Categories
from distdl.domains.detection.record import DetectionRecord, ImageObjects, ObjectFindings
from distdl.stores.files import read_file
from distdl.tools.prepare.source import Files, Progress, Sample, no_folder, refuse_changed
from distdl.util import unpacking
from distdl.util.atomic_files import atomic_file
from distdl.util.errors import Problem, Unfinished, UserError
from distdl.util.wording import first_few, plural

SHOWN = 5  # of what is wrong, in one message
LAYOUT = "annotations/instances_train2017.json and train2017/, or the zips that hold them"
MISSING = "is missing"
WRONG = b"!"  # what a record begins with that is a reason instead


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "what annotation files begin with: instances (the default), person_keypoints, or both"
    parser.add_argument("--labels", default="instances", metavar="A,B", help=text)
    for split in SPLITS:
        text = f"annotation files of {split}, relative to DIR; in a zip: ZIP:MEMBER"
        parser.add_argument(f"--{split}", metavar="JSON,...", help=text)
        text = f"folders and zips with the images of {split}, relative to DIR"
        parser.add_argument(f"--{split}-images", metavar="PATH,...", help=text)


def open_source(options: argparse.Namespace) -> Coco:
    for name in ("max_side", "short_side", "quality"):
        if getattr(options, name) is not None:
            raise UserError.at(
                f"--{name.replace('_', '-')}",
                what="would change the images, whose boxes and masks are in pixels",
                remedy="leave it out",
                code="unsupported",
            )
    if options.format != "shards":
        raise UserError.at(
            "--format",
            what="folders of classes hold no boxes",
            remedy="--format shards",
            code="incomplete",
        )
    labels = _listed(options.labels)
    files = {split: _listed(getattr(options, split)) for split in SPLITS}
    images = {split: _listed(getattr(options, f"{split}_images")) for split in SPLITS}
    splits = _find(options.source, labels, files, images)
    work = None if options.dry_run else options.to / WORK
    return Coco(options.source, splits, work, options.skip_damaged)


def _listed(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word]


def _find(
    source: Path,
    labels: Sequence[str],
    annotations: dict[str, list[str]],
    images: dict[str, list[str]],
) -> dict[str, SplitFiles]:
    if not source.is_dir():
        remedy = f"{unpacking.first(source)}it must hold {LAYOUT}"
        raise UserError(no_folder(source, remedy))
    splits = coco_layout.find(source, "--source", labels, annotations, images)
    for split, files in splits.items():
        if not files.images:
            raise UserError.at(
                "--source",
                what=f"{source} has no images of {split}: no folder, and no zip",
                remedy=f"--{split}-images PATH",
                code="incomplete",
            )
    if "train" in splits or "val" in splits or "test" in splits:
        return splits
    raise UserError.at(
        "--source",
        what=f"{source} has no annotation file {' or '.join(f'{n}_train*.json' for n in labels)}",
        remedy=f"it must hold {LAYOUT}; or name yours: --train JSON",
        code="incomplete",
    )


class Coco:
    """Images with objects, in COCO's format.

    Args:
        folder: Of all paths below.
        splits: The files of each split.
        work: Where the records of the images are kept until they are in shards; None: a dry run.
        skip_damaged: Images that are missing, or whose annotations are wrong, count as damaged;
            otherwise they are refused before anything is written.
    """

    kind = "coco"
    in_blocks = False
    record = DetectionRecord()

    def __init__(
        self, folder: Path, splits: dict[str, SplitFiles], work: Path | None, skip_damaged: bool
    ) -> None:
        self.folder = folder
        self.splits = splits
        self.skip_damaged = skip_damaged
        self.left_out = LeftOut()
        self.notes: list[str] = []
        self.checked: dict[str, CheckedSplit] = {}  # by split, complete at the end of `scan`
        self.categories: list[dict[str, Any]] = []
        self.federated = False
        self.unlabelled: list[str] = []
        self._held: list[set[str]] = []  # what objects have besides boxes, by split with objects
        self._places = [place for files in splits.values() for place in files.images]
        self._records = None if work is None else work / f"records-{self._key}"
        self._files = Files(Path("/"))

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what was found, which would be copied to each process."""
        return {**self.__dict__, "checked": {}, "notes": []}

    @property
    def classes(self) -> list[str]:
        return [str(category["name"]) for category in self.categories]

    def describe(self) -> dict[str, Any]:
        described = {}
        for split, files in self.splits.items():
            annotations = {self._below(f.path, f.member): f.bytes for f in files.annotations}
            images = {
                self._below(place): None if place.is_dir() else place.stat().st_size
                for place in files.images
            }
            described[split] = {"annotations": annotations, "images": images}
        return {"kind": self.kind, "files": described}

    def _below(self, path: Path, member: str = "") -> str:
        inside = path.is_relative_to(self.folder)
        name = path.relative_to(self.folder).as_posix() if inside else path.name
        return f"{name}:{member}" if member else name

    @cached_property
    def _key(self) -> str:
        return hashlib.sha256(json.dumps(self.describe()).encode()).hexdigest()[:16]

    def scan(self, progress: Progress) -> Iterator[Sample]:
        """Reads all annotations, and keeps the record of each image in a file beside the plan: in
        the annotation files the objects of an image are scattered."""
        if self._records is None:
            yield from self._scan(progress, None)
            return
        new = [p for p in (self._records.parent, self._records.parent.parent) if not p.exists()]
        try:
            with atomic_file(self._records) as file:
                yield from self._scan(progress, file)
        except UserError:
            for path in new:  # nothing was there, and nothing is left
                path.rmdir()
            raise

    def _scan(self, progress: Progress, file: BinaryIO | None) -> Iterator[Sample]:
        for split, files in self.splits.items():
            with coco_layout.opened(files.annotations, "--source") as sources:
                annotations = Annotations(sources, "--source", progress)
                self._take(split, annotations)
                yield from self._samples(split, annotations, Images(files.images, "--source"), file)

    def _take(self, split: str, annotations: Annotations) -> None:
        """Compares a split's categories with those of the splits before."""
        self.federated |= annotations.federated
        if not annotations.labelled:
            self.unlabelled.append(split)
        try:
            Categories.of(annotations.categories)
        except ValueError as error:
            raise UserError.at(
                "--source", what=f"the categories of {split}: {error}", code="damaged-file"
            ) from error
        names = {c["id"]: c["name"] for c in annotations.categories}
        known = {c["id"]: c["name"] for c in self.categories}
        if not self.categories:
            self.categories = annotations.categories
        elif names and names != known:
            differing = sorted(names.items() ^ known.items())[:SHOWN]
            shown = ", ".join(f"{identity} {name!r}" for identity, name in differing)
            raise UserError.at(
                "--source",
                what=f"the categories of {split} differ from those of the splits before: {shown}",
                remedy="all splits need the same ids and names",
                code="mismatch",
            )

    def _samples(
        self,
        split: str,
        annotations: Annotations,
        images: Images,
        file: BinaryIO | None,
    ) -> Iterator[Sample]:
        categories = Categories.of(annotations.categories)
        first = self._places.index(images.places[0])
        checked = CheckedSplit(split)
        self.checked[split] = checked
        for index, name in enumerate(annotations.files):
            identity = int(annotations.ids[index])
            found = images.find(name)
            try:
                text = annotations.record(index)
                checked.add(name, self.record.decode(text), categories)
            except ValueError as error:
                checked.wrong.append(f"{name} (image {identity}): {error}")
                text = WRONG + str(error).encode()
            if found is None:
                checked.missing.append(f"{name} (image {identity})")
            start = 0
            if file is not None:
                start = file.tell()
                file.write(text)
            place = (-1, name) if found is None else (first + found.place, found.name)
            member = tuple(found.member) if found and found.member else ()
            size, mtime = (found.bytes, found.mtime_ns) if found else (0, 0)
            size += len(text)
            yield Sample(split, name, 0, size, (*place, start, len(text), *member), mtime)
        if checked.found.objects and (split != "test" or not self._held):
            self._held.append(checked.found.held)
        self.notes += checked.notes(annotations)
        if not self.skip_damaged:
            checked.refuse(self.folder)

    def refuse_known(self, out: Path) -> None:
        """Refuses images with ids that images of a prepared set have: a metric tells images apart
        by them."""
        data = open_data_set(str(out))
        for split in [name for name in self.checked if name in data.manifest.splits]:
            shards = Shards(data, split)
            records = map(self.record.decode, map(shards.record, range(len(shards))))
            held = {record.image["id"] for record in records}
            if both := sorted(held.intersection(self.checked[split].found.image_ids)):
                noun = plural("image", len(both))
                what = f"{len(both):,} {noun} of {split} have ids that are in {out} already: "
                ids = first_few([str(identity) for identity in both])
                raise UserError.at(
                    "--source",
                    what=what + ids,
                    remedy="give each image an id of its own",
                    code="ambiguous",
                )

    def read(self, sample: Sample) -> bytes:
        place, name, _, _, *inner = sample.where
        if int(place) < 0:
            raise ValueError(MISSING)
        path = self._places[int(place)]
        if not inner:
            data = read_file(path / str(name))
            refuse_changed(path / str(name), (path / str(name)).stat(), sample.mtime_ns, len(data))
            return data
        member = ZipMember(*map(int, inner))
        absolute = str(path.absolute()).lstrip("/")

        def read_at(offset: int, length: int) -> bytes:
            return self._files.read(absolute, offset, length, sample.mtime_ns)

        return zips.read(read_at, member)

    def annotation(self, sample: Sample) -> ImageObjects:
        """What is known of an image; raises ValueError if it is of no use."""
        assert self._records is not None
        _, _, start, length, *_ = sample.where
        name = str(self._records.absolute()).lstrip("/")
        try:
            text = self._files.read(name, int(start), int(length))
        except OSError as error:
            raise Unfinished.at(
                "--to",
                what=f"{self._records} is gone, or was changed: {error.strerror or error}",
                remedy="another --to, or remove this one",
                code="incomplete",
            ) from error
        if text.startswith(WRONG):
            raise ValueError(text.removeprefix(WRONG).decode())
        return self.record.decode(text)

    @property
    def contents(self) -> dict[str, Any]:
        """What the manifest says besides the classes; complete at the end of `scan`."""
        categories = [dict(category) for category in self.categories]
        return {
            "categories": categories,
            "federated": self.federated,
            "holds": sorted(set.intersection(*self._held)) if self._held else None,
            "unlabelled": self.unlabelled,
        }


class CheckedSplit:
    """What is wrong or unusual in a split: images that are missing, annotations that cannot be
    used, and the `found` objects of the others."""

    def __init__(self, split: str) -> None:
        self.split = split
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self.found = ObjectFindings()

    def add(self, name: str, image: ImageObjects, categories: Categories) -> None:
        """Raises ValueError if an annotation cannot be used."""
        if why := ", ".join(records.wrong(image, categories)):
            raise ValueError(why)
        self.found.look(name, image, categories)

    def notes(self, annotations: Annotations) -> list[str]:
        """What the user is told before anything is written."""
        if not annotations.labelled:
            return [f"{self.split} has no annotations: it can be predicted"]
        found = self.found
        lines = [
            f"{self.split}: {found.objects:,} objects, {found.crowds:,} of them crowds; "
            f"{found.empty:,} of {len(annotations):,} images without objects"
        ]
        lines += [f"{self.split}: {line} (they stay)" for line in found.unusual()]
        if annotations.federated:
            lines.append(
                f"{self.split} is federated (as LVIS): it trains, but COCO's metric does not "
                "evaluate it, as an image may show objects that nobody has looked for"
            )
        return lines

    def refuse(self, folder: Path) -> None:
        """Raises a UserError for missing images and wrong annotations."""
        problems = []
        if count := len(self.missing):
            are = "are" if count > 1 else "is"
            remedy = f"--{self.split}-images PATH, if they are elsewhere; "
            problems.append(
                Problem(
                    "--source",
                    what=(
                        f"{count:,} {plural('image', count)} of {self.split} {are} not in "
                        f"{folder}: "
                        f"{_some(self.missing)}"
                    ),
                    remedy=remedy + "to leave them out: --skip-damaged",
                    code="incomplete",
                )
            )
        if count := len(self.wrong):
            problems.append(
                Problem(
                    "--source",
                    what=(
                        f"the annotations of {count:,} {plural('image', count)} of {self.split} "
                        "cannot be "
                        f"used: {_some(self.wrong)}"
                    ),
                    remedy="correct the annotation file; to leave these images out: --skip-damaged",
                    code="damaged-file",
                )
            )
        if problems:
            raise UserError(*problems)


def _some(texts: Sequence[str]) -> str:
    more = f"\n    and {len(texts) - SHOWN:,} more" if len(texts) > SHOWN else ""
    return "".join(f"\n    {text}" for text in texts[:SHOWN]) + more
