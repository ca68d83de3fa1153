"""Plans which sample goes into which shard. The plan is saved before any shard is written."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from distdl.datasets.format import BLOCK, CLASSIFICATION, SPLITS, Manifest
from distdl.datasets.image_files import EXTENSIONS
from distdl.datasets.reading import DataSet, Shards
from distdl.tools.prepare.source import Progress, Sample, Source, record_of
from distdl.util.atomic_files import atomic_file
from distdl.util.errors import UserError

MB = 10**6
KEY_LENGTH = 80


@dataclass(frozen=True)
class Part:
    """The unit of work: one shard's pairs of key and sample, in order.

    `number` counts from 0 within the split.
    """

    split: str
    number: int
    samples: tuple[tuple[str, Sample], ...]

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}"

    @property
    def bytes(self) -> int:
        """Size of its images in the source."""
        return sum(sample.bytes for _, sample in self.samples)


@dataclass(frozen=True)
class ShardPlan:
    """All parts, training first, and the settings (source and options) that determine them.

    `contents` are those of an `Annotated` source, and its "domain"; {}: images with labels.
    """

    settings: dict[str, Any]
    classes: list[str]
    parts: list[Part]
    contents: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        named = {"classes": self.classes, **self.contents} if self.contents else self.classes
        with atomic_file(path) as file:
            for line in chain((self.settings, named), map(_packed, self.parts)):
                file.write(json.dumps(line).encode() + b"\n")

    @classmethod
    def load(cls, path: Path) -> ShardPlan:
        with path.open(encoding="utf-8") as file:
            settings, named = json.loads(next(file)), json.loads(next(file))
            contents = named if isinstance(named, dict) else {"classes": named}
            classes = contents.pop("classes")
            parts = [_unpacked(json.loads(line)) for line in file]
            return cls(settings, classes, parts, contents)


def settings_of(path: Path) -> dict[str, Any]:
    """The settings of a saved plan, without loading its parts."""
    with path.open(encoding="utf-8") as file:
        return dict(json.loads(next(file)))


def make(source: Source, settings: dict[str, Any], progress: Progress) -> ShardPlan:
    """Scans the source, shuffles the training samples and cuts all splits into shards.

    Training samples are stored in random order, so that reading shards one after the other gives
    mixed classes. Other splits keep the source's order. `settings` has "seed" and "shard_mb", the
    size of a shard in MB, before images are changed.
    """
    splits: dict[str, list[tuple[str, Sample]]] = {split: [] for split in SPLITS}
    keys = {split: Keys() for split in splits}
    for sample in source.scan(progress):
        splits[sample.split].append((keys[sample.split].make(sample.name), sample))
    splits["train"] = shuffled(splits["train"], settings["seed"], blocks=source.in_blocks)
    size = settings["shard_mb"] * MB
    parts = [part for split, samples in splits.items() for part in cut(split, samples, size)]
    record = record_of(source)
    contents = {} if record is None else {"domain": record.domain, **source.contents}  # type: ignore[attr-defined]
    return ShardPlan(settings, source.classes, parts, contents)


def continued(plan: ShardPlan, data: DataSet) -> ShardPlan:
    """A plan whose shards are numbered after those of a data set in a folder, whose keys are not
    in it, and whose classes are the set's, followed by new ones.

    Raises:
        UserError: The plan is of another domain or of other categories, or its images have
            annotations of other kinds than those of the same split.
    """
    manifest = data.manifest
    now: dict[str, object] = {"domain": manifest.domain}
    if manifest.version != 1:
        now |= {"categories": [*manifest.categories], "federated": manifest.federated}
    planned = {"domain": CLASSIFICATION, **plan.contents}
    different = [key for key, value in now.items() if planned.get(key) != value]
    if different:
        raise UserError.at(
            "--source",
            what=f"is of other {' and '.join(different)} than the data set",
            remedy="prepare it into a folder of its own",
            code="mismatch",
        )
    contents = {**plan.contents, "holds": _held(plan, manifest)} if plan.contents else {}
    classes = [*dict.fromkeys((*manifest.classes, *plan.classes))]
    label_of = [classes.index(name) for name in plan.classes]
    keys = {name: Keys(_keys(data, name)) for name in manifest.splits}
    parts = []
    for part in plan.parts:
        split = manifest.splits.get(part.split)
        number = part.number + (len(split.shards) if split else 0)
        samples = part.samples
        if part.split in keys:
            samples = tuple((keys[part.split].make(k), s) for k, s in samples)
        if manifest.domain == CLASSIFICATION:
            samples = tuple((k, replace(s, label=label_of[s.label])) for k, s in samples)
        parts.append(Part(part.split, number, samples))
    return ShardPlan(plan.settings, classes, parts, contents)


def _keys(data: DataSet, split: str) -> Iterator[str]:
    """Those of the samples of a split. `Shards.member` says "shard:key.ending"."""
    shards = Shards(data, split)
    for index in range(len(shards)):
        yield shards.member(index).rpartition(":")[2].partition(".")[0]


def _held(plan: ShardPlan, manifest: Manifest) -> list[str]:
    """What objects have besides boxes, in training and validation of the whole set.

    Raises:
        UserError: Those that are added have more or less of it, or a split would have images with
            annotations and images without.
    """
    splits = {part.split for part in plan.parts}
    before = {name: split for name, split in manifest.splits.items() if split.samples}
    remedy = "annotate both alike, or prepare it into a folder of its own"
    for name in [each for each in SPLITS if each in splits and each in before]:
        labelled = name not in plan.contents.get("unlabelled", ())
        if labelled != before[name].labelled:
            ours, theirs = ("have", "have none") if labelled else ("lack", "have them")
            raise UserError.at(
                "--source",
                what=f"its images of {name} {ours} annotations, and those of the data set {theirs}",
                remedy=remedy,
                code="mismatch",
            )
    known = set(manifest.holds)
    if plan.contents.get("holds") is None or not splits & {"train", "val"}:  # no objects to compare
        return sorted(known)
    added = set(plan.contents["holds"])
    if not before.keys() & {"train", "val"}:
        return sorted(added)
    if "train" in splits & before.keys():
        differs = added != known
    else:  # validation may have more than training, which then is not used
        differs = "train" not in splits and not known <= added
    if differs:
        ours, theirs = (", ".join(sorted(each)) or "boxes alone" for each in (added, known))
        raise UserError.at(
            "--source",
            what=f"its objects have {ours}, and those of the data set {theirs}",
            remedy=remedy,
            code="mismatch",
        )
    return sorted(known & added)


def shuffled(
    samples: list[tuple[str, Sample]], seed: int, blocks: bool
) -> list[tuple[str, Sample]]:
    """The samples in random order; with `blocks`, samples of a block stay together."""
    random = np.random.default_rng(seed)
    if not blocks:
        return [samples[i] for i in random.permutation(len(samples))]
    groups = [list(group) for _, group in groupby(samples, key=lambda s: s[1].where[:-1])]
    return [sample for i in random.permutation(len(groups)) for sample in groups[i]]


def cut(split: str, samples: Sequence[tuple[str, Sample]], size: float) -> Iterator[Part]:
    """Cuts samples into shards of about `size` bytes each, all of about equal length."""
    ends = np.cumsum([in_tar(sample.bytes) for _, sample in samples])
    if not len(ends):
        return
    count = min(len(samples), max(1, round(ends[-1] / size)))
    # By the middle of each image, so that each bound is off by at most half an image.
    middles = ends - np.diff(ends, prepend=0) / 2
    bounds = np.searchsorted(middles, ends[-1] * np.arange(count + 1) / count)
    pieces = (samples[a:b] for a, b in pairwise(bounds) if b > a)
    for number, piece in enumerate(pieces):
        yield Part(split, number, tuple(piece))


def in_tar(length: int) -> int:
    """Bytes that an image of `length` bytes takes in a shard, with its label and headers."""
    return 3 * BLOCK + -(-length // BLOCK) * BLOCK


class Keys:
    """Makes member names: unique, and without dots, since webdataset ends a key at the first."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._times: Counter[str] = Counter()

    def make(self, name: str) -> str:
        """A key from a file name or path: "n01440764_10026.JPEG" gives n01440764_10026."""
        if name.lower().endswith(EXTENSIONS):
            name = name.rpartition(".")[0]
        base = key = re.sub(r"[^A-Za-z0-9_-]", "_", name)[-KEY_LENGTH:] or "image"
        while key in self._taken:
            self._times[base] += 1
            key = f"{base}_{self._times[base] + 1}"
        self._taken.add(key)
        return key


def _packed(part: Part) -> list[Any]:
    # The split is written once per line, not per sample: ImageNet's plan has 130 MB already.
    samples = [[key, s.name, s.label, s.bytes, s.where, s.mtime_ns] for key, s in part.samples]
    return [part.split, part.number, samples]


def _unpacked(line: list[Any]) -> Part:
    split, number, rows = line
    samples = (
        (key, Sample(split, name, label, length, tuple(where), *mtime))
        for key, name, label, length, where, *mtime in rows
    )
    return Part(split, number, tuple(samples))
