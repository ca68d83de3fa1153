"""`data check`: inspects images, measures rates, and compares them with what the GPUs need."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from distdl.config import resources
from distdl.ranks import scratch
from distdl.stores import StoreError
from distdl.tools.data_check import image_files, needs, profile, sources, throughput
from distdl.tools.data_check import screen as show
from distdl.tools.data_check.image_files import Findings
from distdl.tools.data_check.sources import DataAtUri, SplitImages
from distdl.tools.prepare.next_steps import override
from distdl.util.answers import Answer
from distdl.util.errors import UserError
from distdl.util.progress_bar import Bar

PROFILED = 100  # images, at most


def check(options: argparse.Namespace) -> Answer:
    """Prints the report; see `distdl.cli.data.main` for options, exit status and errors."""
    scratch.refuse(None, 1)
    gpu = options.gpu or gpu_of_this_machine()
    gpus = options.gpus or resources.visible_gpus() or 1
    wanted = needs.need(options.model, (gpu or "h100").lower(), options.rate)
    if not gpu and not options.rate:
        source = f"{wanted.source}; this machine has none: --gpu names yours"
        wanted = replace(wanted, source=source)
    data = sources.find(options.uri)
    data.max_pixels = options.max_pixels
    screen = show.Screen()
    show.contents(screen, data)
    try:
        seen, rates = inspect(data, options)
    except StoreError as error:
        raise UserError.at(
            data.uri, what=str(error), remedy=error.remedy, code=error.code
        ) from error
    every = sum(s.count for s in seen.values()) == data.count
    show.images(screen, seen, every, colours=data.categories is None)
    if data.categories is not None:
        return screen.answer(data, seen, of_objects(screen, data, seen, rates, every))
    if options.profile is not None:
        profiled(screen, data, options)
    if rates is None:
        screen.line("verdict", "none of the inspected images can be decoded")
        return screen.answer(data, seen, 1)
    cores = resources.cpu_cores()
    show.rates(screen, data, rates, wanted)
    formats = [needs.Format("as they are", rates.decoding)]
    if rates.smaller:
        source = shlex.quote(data.uri)
        how = f"python -m distdl prepare folder --source {source} --to OUT --short-side 256"
        if data.kind != "folders of images":
            how = "python -m distdl prepare ... --short-side 256 --quality 90, from the originals"
        formats.append(needs.Format("with a short side of 256, quality 90", rates.smaller, how))
    verdict = needs.judge(wanted, formats, rates.reading, cores, gpus)
    show.needs(screen, formats, wanted, cores, gpus)
    workers = min(needs.workers_for(wanted.rate, rates.decoding), cores // gpus or 1)
    memory = needs.shm(workers, gpus, options.batch_size, options.image_size)
    show.shm(screen, memory, workers, options.batch_size)
    screen.line("verdict", verdict.text)
    if verdict.before:
        screen.line("first", verdict.before)
    usable = [o for o in verdict.overrides if resources.visible_gpus() or "nvjpeg" not in o]
    screen.line("next", next_command(data, usable))
    screen.rates = show.FeedRates(
        read=rates.reading,
        decoded={each.name: each.per_core for each in formats},
        needed=wanted.rate,
        cores=cores / gpus,
        fed=verdict.fed,
        remedy=usable,
    )
    return screen.answer(data, seen, int(any(s.damaged for s in seen.values())))


def of_objects(
    screen: show.Screen,
    data: DataAtUri,
    seen: dict[str, Findings],
    rates: throughput.Rates | None,
    every: bool,
) -> int:
    """The rest of the report about a detection set. What a detector needs is not published as a
    rate of images, so there is no verdict on it."""
    bad = show.objects(screen, data, seen, every)
    if rates is not None:
        screen.line("reading", f"{rates.reading:,.0f} img/s by one process")
    root = override("data.root", data.uri)
    classes = f"data.num_classes={len(data.classes)}"
    screen.line("next", f"python -m distdl data=coco {root} {classes} model=maskrcnn")
    return 1 if bad or any(s.damaged for s in seen.values()) else 0


def inspect(data: DataAtUri, options: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """The findings of each split, and the rates of the first one with intact images, or None."""
    rates = None
    seen = {}
    for name, images in data.splits.items():
        if not len(images.labels) or (options.all and rates is not None):
            continue
        shard, rows = sample(images, options.sample, data.store is not None)
        with data.reading(images, shard) as reader:
            if rates is None:
                rates = throughput.measure(reader, rows, options.image_size)
            if not options.all:
                seen[name] = image_files.inspect_images(reader, rows)
    if options.all:
        total = data.count
        with Bar("looking at every image") as bar:

            def progress(done: int) -> None:
                bar(done, total, f"{done:,} of {total:,}")

            seen = image_files.inspect_all_images(data, os.cpu_count() or 1, progress)
    return seen, rates


def profiled(screen: show.Screen, data: DataAtUri, options: argparse.Namespace) -> None:
    """Shows where the CPU time of an image goes, by images of the first split that has some."""
    images = next(each for each in data.splits.values() if len(each.labels))
    shard, rows = sample(images, min(options.sample, PROFILED), data.store is not None)
    with data.reading(images, shard) as reader:
        found = profile.measure(reader, rows, options.image_size)
    if found is None:
        return
    show.profile(screen, found)
    if options.profile:
        profile.draw(found, Path(options.profile))
        screen.line("", f"the bars: {options.profile}")


def sample(images: SplitImages, count: int, remote: bool) -> tuple[int | None, Any]:
    """The middle shard (None: nothing must be downloaded), and evenly spread image indices."""
    shard = None
    rows = np.arange(len(images.labels))
    if remote:
        shard = len(images.names) // 2
        rows = np.flatnonzero(images.where["shard"] == shard)
    picked = np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)
    return shard, rows[picked]


def gpu_of_this_machine() -> str | None:
    """The name in `GPUS` of a GPU of this machine; None if it has none of them."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout.lower()
    return next((name for name in needs.GPUS if name in shown), None)


def next_command(data: DataAtUri, overrides: Sequence[str]) -> str:
    """The command that trains on this data."""
    classes = len(data.classes)
    config = "+experiment=resnet50_imagenet"
    if classes != 1000:
        config = f"data=imagenet data.num_classes={classes}"
    return " ".join(["python -m distdl", config, override("data.root", data.uri), *overrides])
