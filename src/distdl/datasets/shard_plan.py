"""Which sample goes into which shard: decided before anything is written, and kept in one file."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from distdl.datasets.image_files import EXTENSIONS
from distdl.datasets.source import Progress, Sample, Source
from distdl.datasets.writing import BLOCK
from distdl.util.atomic_files import atomic_file

MB = 10**6
KEY_LENGTH = 80


@dataclass(frozen=True)
class Part:
    """What is written in one go: the samples of one shard, in their order.

    Args:
        split: "train" or "val".
        number: From 0, within its split.
        samples: Each with its key.
    """

    split: str
    number: int
    samples: tuple[tuple[str, Sample], ...]

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}"

    @property
    def bytes(self) -> int:
        """Of its images as they are in the source."""
        return sum(sample.bytes for _, sample in self.samples)


@dataclass(frozen=True)
class ShardPlan:
    """All parts, and what they were made from.

    Args:
        settings: The source and the options; other settings make another plan.
        classes: By label.
        parts: Training first.
    """

    settings: dict[str, Any]
    classes: list[str]
    parts: list[Part]

    def save(self, path: Path) -> None:
        with atomic_file(path) as file:
            for line in chain((self.settings, self.classes), map(_packed, self.parts)):
                file.write(json.dumps(line).encode() + b"\n")

    @classmethod
    def load(cls, path: Path) -> ShardPlan:
        with path.open(encoding="utf-8") as file:
            settings, classes = json.loads(next(file)), json.loads(next(file))
            return cls(settings, classes, [_unpacked(json.loads(line)) for line in file])


def settings_of(path: Path) -> dict[str, Any]:
    """Of a saved plan, without the plan."""
    with path.open(encoding="utf-8") as file:
        settings: dict[str, Any] = json.loads(next(file))
        return settings


def make(source: Source, settings: dict[str, Any], progress: Progress) -> ShardPlan:
    """Scans the source, shuffles the training samples and cuts both splits into shards.

    The training samples are in a random order on the disk, so that shards read one after the
    other give mixed classes. Validation keeps the source's order.

    Args:
        source: What is to be prepared.
        settings: Has "seed" and "shard_mb", the size of a shard as its images were (MB).
        progress: Of the scan.
    """
    splits: dict[str, list[tuple[str, Sample]]] = {"train": [], "val": []}
    keys = {split: Keys() for split in splits}
    for sample in source.scan(progress):
        splits[sample.split].append((keys[sample.split].make(sample.name), sample))
    splits["train"] = shuffled(splits["train"], settings["seed"], blocks=source.in_blocks)
    size = settings["shard_mb"] * MB
    parts = [part for split, samples in splits.items() for part in cut(split, samples, size)]
    return ShardPlan(settings, source.classes, parts)


def shuffled(
    samples: list[tuple[str, Sample]], seed: int, blocks: bool
) -> list[tuple[str, Sample]]:
    """In another order; blocks stay together where a source cannot read one sample alone."""
    random = np.random.default_rng(seed)
    if not blocks:
        return [samples[i] for i in random.permutation(len(samples))]
    groups = [list(group) for _, group in groupby(samples, key=lambda s: s[1].where[:-1])]
    return [sample for i in random.permutation(len(groups)) for sample in groups[i]]


def cut(split: str, samples: Sequence[tuple[str, Sample]], size: float) -> Iterator[Part]:
    """Shards of about equal length, whose number is what `size` (bytes) asks for."""
    ends = np.cumsum([in_tar(sample.bytes) for _, sample in samples])
    if not len(ends):
        return
    count = min(len(samples), max(1, round(ends[-1] / size)))
    # By its middle, so that a shard is never more than half an image from its share.
    middles = ends - np.diff(ends, prepend=0) / 2
    bounds = np.searchsorted(middles, ends[-1] * np.arange(count + 1) / count)
    pieces = [samples[a:b] for a, b in pairwise(bounds) if b > a]
    for number, piece in enumerate(pieces):
        yield Part(split, number, tuple(piece))


def in_tar(length: int) -> int:
    """Bytes that an image of `length` takes in a shard, its label and headers included."""
    return 3 * BLOCK + -(-length // BLOCK) * BLOCK


class Keys:
    """Names of members: webdataset ends a key at the first dot, and keys must differ."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._times: Counter[str] = Counter()

    def make(self, name: str) -> str:
        """Of a file name or path: "n01440764_10026.JPEG" is n01440764_10026."""
        if name.lower().endswith(EXTENSIONS):
            name = name.rpartition(".")[0]
        base = key = re.sub(r"[^A-Za-z0-9_-]", "_", name)[-KEY_LENGTH:] or "image"
        while key in self._taken:
            self._times[base] += 1
            key = f"{base}_{self._times[base] + 1}"
        self._taken.add(key)
        return key


def _packed(part: Part) -> list[Any]:
    # The split is written once in the line and not in each sample: a plan of ImageNet has 130 MB.
    samples = [[key, s.name, s.label, s.bytes, s.where, s.mtime_ns] for key, s in part.samples]
    return [part.split, part.number, samples]


def _unpacked(line: list[Any]) -> Part:
    split, number, samples = line

    def each() -> Iterable[tuple[str, Sample]]:
        for key, name, label, length, where, *mtime in samples:
            yield key, Sample(split, name, label, length, tuple(where), *mtime)

    return Part(split, number, tuple(each()))
