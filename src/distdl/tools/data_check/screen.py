"""The report of `data check`: lines and small tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from distdl.tools.data_check.image_files import Findings
from distdl.tools.data_check.needs import Format, Need, Shm, cores_for
from distdl.tools.data_check.profile import MEANING, Profile
from distdl.tools.data_check.sources import DataAtUri
from distdl.tools.data_check.throughput import Rates
from distdl.util import table
from distdl.util.answers import Answer
from distdl.util.progress_bar import size
from distdl.util.screen import escaped, say
from distdl.util.wording import first_few, plural

BAR, WIDTH = "#", 30  # of a profile
SHOWN = 5  # of what is wrong, unless every image is looked at
INDENT = 9  # of what follows the leading word


@dataclass(frozen=True)
class CheckedData:
    """What a look at a data set found."""

    SCHEMA: ClassVar[str] = "data-check/1"

    uri: str
    kind: str
    """`shards`, or another word for how the images are stored."""
    classes: int
    images: Mapping[str, int]
    """How many each split holds."""
    inspected: int
    """How many of them were decoded: all with --all, else a sample."""
    damaged: Sequence[str]
    """Each as `SPLIT: NAME: REASON`."""
    wrong: Sequence[str]
    """Annotations of objects that cannot be used."""
    rates: FeedRates | None
    """None for a detection set, and if no image can be decoded."""
    lines: Sequence[Sequence[str]]
    """What people are shown: each a word (`damaged`, `verdict`, `next`, ...) and a text."""


@dataclass(frozen=True)
class FeedRates:
    """Whether this machine reads images as fast as its GPUs train, in images per second."""

    read: float
    """By one process, from the disk."""
    decoded: Mapping[str, float]
    """By one core, for each form of the images; the first is the one they have."""
    needed: float
    """By one GPU."""
    cores: float
    """Of this machine, per GPU."""
    fed: bool
    remedy: Sequence[str]
    """Overrides of the run that help; empty: none is needed, or another machine is."""


class Screen:
    """Prints lines with a leading word, and tables, on a terminal or in a log."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.rates: FeedRates | None = None
        self._lines: list[tuple[str, str]] = []

    def answer(self, data: DataAtUri, seen: Mapping[str, Findings], exit_code: int) -> Answer:
        """What was found, and all lines that were printed."""
        found = CheckedData(
            data.uri,
            data.kind,
            len(data.classes),
            {name: len(images.sizes) for name, images in data.splits.items()},
            sum(each.count for each in seen.values()),
            damaged_in(seen),
            self.wrong,
            self.rates,
            self._lines,
        )
        return Answer(found, exit_code)

    def line(self, word: str, text: str) -> None:
        self._lines.append((word, escaped(text)))
        say(f"{word:{INDENT}}{escaped(text)}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table.show(columns, rows, numbers=True, indent=INDENT)


def contents(screen: Screen, data: DataAtUri) -> None:
    if data.categories is not None:
        return _contents_of_objects(screen, data)
    count = len(data.classes)
    classes = f"{count:,} {plural('class', count)}"
    screen.line("data", f"{data.uri}  ({data.kind}, {classes})")
    rows = []
    for name, images in data.splits.items():
        counts = np.bincount(images.labels, minlength=len(data.classes))
        each = f"{counts.min():,} / {int(np.median(counts)):,} / {counts.max():,}"
        total = size(float(images.sizes.sum()))
        rows.append((name, f"{len(images.labels):,}", f"{images.files:,}", total, each))
        empty = np.flatnonzero(counts == 0)
        if len(empty):
            shown = first_few([data.classes[int(label)] for label in empty])
            have = "class has" if len(empty) == 1 else "classes have"
            screen.line("note", f"{name}: {len(empty)} {have} no image: {shown}")
    screen.table(("split", "images", "files", "size", "per class: min / median / max"), rows)
    for line in data.left_out:
        screen.line("note", line)


def _contents_of_objects(screen: Screen, data: DataAtUri) -> None:
    count = len(data.classes)
    screen.line("data", f"{data.uri}  ({data.kind}, {count:,} categories)")
    rows = []
    for name, images in data.splits.items():
        total = size(float(images.sizes.sum()))
        rows.append((name, f"{len(images.sizes):,}", f"{images.files:,}", total))
    screen.table(("split", "images", "files", "size"), rows)


def objects(screen: Screen, data: DataAtUri, seen: dict[str, Findings], every: bool) -> int:
    """What there is to say about objects; returns how many annotations cannot be used."""
    bad = 0
    for name, split in seen.items():
        found = split.objects
        wrong = found.wrong
        missing: list[str] = []
        if data.coco is not None:  # whose annotations were all looked at
            checked = data.coco.checked[name]
            found = checked.found
            wrong = checked.wrong
            missing = [f"{image}: is missing" for image in checked.missing]
        text = (
            f"{name}: {found.objects:,} objects in {found.images:,} images, {found.crowds:,} of "
            f"them crowds; {found.empty:,} {plural('image', found.empty)} without objects"
        )
        screen.line("objects", text)
        for line in found.unusual():
            screen.line("", f"{name}: {line}")
        problems = [*found.twice(), *wrong, *missing]
        screen.wrong += [f"{name}: {line}" for line in problems]
        shown = problems if every else problems[:SHOWN]
        for line in shown:
            screen.line("wrong", f"{name}: {line}")
        if len(problems) > len(shown):
            screen.line("", f"... and {len(problems) - len(shown)} more (--all names each)")
        bad += len(problems)
    if data.coco is not None:
        for note in data.coco.notes:
            if "federated" in note or "no annotations" in note:
                screen.line("note", note)
    return bad


def images(screen: Screen, seen: dict[str, Findings], every: bool, colours: bool = True) -> None:
    count = sum(s.count for s in seen.values())
    sizes = np.array([size for s in seen.values() for size in s.sizes])
    if len(sizes):
        low_w, low_h = sizes.min(0)
        high_w, high_h = sizes.max(0)
        width, height = np.median(sizes, axis=0).astype(int)
        extent = f"from {low_w} x {low_h} to {high_w} x {high_h}"
        share = f"{'all' if every else 'a sample of'} {count:,}"
        screen.line("images", f"{width} x {height} pixels (median), {extent}; {share}")
    train = seen.get("train")
    if colours and train and train.sizes:
        mean, std = (", ".join(f"{v:.3f}" for v in values) for values in train.average())
        text = f"data.mean=[{mean}] data.std=[{std}]  (train; ImageNet's are usual)"
        screen.line("colours", text)
    damaged = damaged_in(seen)
    if not damaged:
        screen.line("damaged", f"none of {count:,}" + ("" if every else " (every image: --all)"))
        return
    screen.line("damaged", f"{len(damaged):,} of {count:,}")
    shown = damaged if every else damaged[:5]
    for text in shown:
        screen.line("", text)
    if len(damaged) > len(shown):
        screen.line("", f"... and {len(damaged) - len(shown)} more (--all names each)")


def damaged_in(seen: Mapping[str, Findings]) -> list[str]:
    return [f"{name}: {text}" for name, found in seen.items() for text in found.damaged]


def rates(screen: Screen, data: DataAtUri, rates: Rates, wanted: Need) -> None:
    mean = rates.reading_bytes / rates.reading
    if data.store is not None:
        speed = data.downloaded_bytes / max(data.download_seconds, 1e-9)
        screen.line(
            "download",
            f"{size(speed)}/s, {speed / mean:,.0f} img/s: the first epoch of a node goes no faster;"
            f" one GPU takes {size(wanted.rate * mean)}/s. Later epochs read the node's disk",
        )
    text = f"{rates.reading:,.0f} img/s, {size(rates.reading_bytes)}/s by one process"
    screen.line("reading", text)
    screen.line("need", f"{wanted.rate:,.0f} img/s for each GPU: {wanted.source}")


def needs(screen: Screen, formats: Sequence[Format], wanted: Need, cores: int, gpus: int) -> None:
    rows = []
    for each in formats:
        needed = str(cores_for(wanted.rate, each.per_core))
        rows.append(
            (f"decoding, {each.name}", f"{each.per_core:,.0f}", needed, f"{cores / gpus:g}")
        )
    columns = ("", "img/s per core", "cores needed per GPU", f"available (GPUs: {gpus})")
    screen.table(columns, rows)


def profile(screen: Screen, found: Profile) -> None:
    """Bars of the CPU time of each stage."""
    screen.line("profile", f"CPU time of one image, by {found.decoder}: {found.total:.3f} ms")
    most = max(found.stages.values())
    rows = []
    for name, spent in found.stages.items():
        bar = BAR * max(1, round(WIDTH * spent / most))
        rows.append((name, f"{spent:.3f}", f"{spent / found.total:.0%}", bar, MEANING[name]))
    lines = table.text(("stage", "ms", "share", "", ""), rows, numbers=False, indent=INDENT)
    say(lines)
    for note in found.notes:
        screen.line("", note)
    if found.advice:
        screen.line("helps", found.advice)


def shm(screen: Screen, memory: Shm, workers: int, batch: int) -> None:
    per_gpu = f"{workers} {plural('worker', workers)} x 2 batches of {batch} per GPU"
    if memory.size is None:
        screen.line("shm", f"{size(memory.needed)} needed ({per_gpu}); there is no /dev/shm here")
        return
    text = f"{size(memory.size)} in /dev/shm, {size(memory.needed)} needed ({per_gpu})"
    if not memory.fits:
        gib = -(-memory.needed * 3 // 2 // 2**30)
        text += f": too small. docker run --shm-size={gib}g; launcher.shm_size={gib}g on Azure ML"
    screen.line("shm", text)
