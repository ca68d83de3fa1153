"""`python -m distdl data check URI`: what a data set holds, and whether it feeds the GPUs."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distdl.commands._prepare_next import override
from distdl.commands.prepare import Parser
from distdl.errors import Problem, UserError
from distdl.suggest import closest

EPILOG = """\
URI is what data.root takes: a folder with train/ and val/, a prepared folder, azure://container/path,
abfss://..., https://..., s3://bucket/path. Exit code 1: there are damaged images.

  python -m distdl data check /path/to/imagenet
  python -m distdl data check azure://datasets/imagenet --model resnet50 --gpu a100 --gpus 8
"""


def main(argv: Sequence[str]) -> int:
    """Prints one screen.

    Returns:
        status: 0, or 1 if there are damaged images.

    Raises:
        UserError: There is no data set, or an option is wrong.
    """
    parser = Parser("python -m distdl data", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    text = "what a data set holds, how fast it is read here, and whether that feeds the GPUs"
    check_ = verbs.add_parser(
        "check",
        help=text,
        description=text,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check_.add_argument("uri", metavar="URI")
    check_.add_argument("--all", action="store_true", help="look at every image, not at some")
    check_.add_argument("--sample", type=int, default=400, metavar="N", help="images (400)")
    check_.add_argument("--model", default="resnet50", help="(resnet50)")
    check_.add_argument("--gpu", help="k80 ... v100, a100, h100, h200 (this machine's, else h100)")
    check_.add_argument(
        "--gpus", type=int, help="that share this machine's cores (as it has, or 1)"
    )
    check_.add_argument("--rate", type=float, help="img/s that one GPU trains, as you measured it")
    check_.add_argument("--batch-size", type=int, default=256, help="per GPU (256)")
    check_.add_argument("--image-size", type=int, default=224, help="pixels (224)")
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        near = closest(unknown[0].partition("=")[0], check_._option_string_actions)
        remedy = f"did you mean: {near}" if near else "python -m distdl data check --help"
        raise UserError(Problem(unknown[0], "is no option of data check", remedy))
    counts = ("sample", "gpus", "batch_size", "image_size")
    problems = [
        Problem(f"--{name.replace('_', '-')}", f"must be 1 or more, not {value}")
        for name in counts
        if (value := getattr(options, name)) is not None and value < 1
    ]
    if problems:
        raise UserError(*problems)
    return check(options)


def check(options: argparse.Namespace) -> int:
    from distdl import resources
    from distdl.commands import _data_needs as needs
    from distdl.commands import _data_open
    from distdl.commands import _data_screen as show
    from distdl.stores import StoreError

    gpu = options.gpu or gpu_of_this_machine()
    gpus = options.gpus or resources.visible_gpus() or 1
    wanted = needs.need(options.model, (gpu or "h100").lower(), options.rate)
    if not gpu and not options.rate:
        wanted = replace(wanted, said=f"{wanted.said}; this machine has none: --gpu names yours")
    found = _data_open.find(options.uri)
    screen = show.Screen()
    show.contents(screen, found)
    try:
        seen, rates = inspect(found, options)
    except StoreError as error:
        raise UserError(Problem(found.uri, str(error), error.remedy)) from error
    total = sum(len(images.labels) for images in found.splits.values())
    show.images(screen, seen, sum(s.count for s in seen.values()) == total)
    if rates is None:
        screen.line("verdict", "none of the images that were looked at can be decoded")
        return 1
    cores = resources.cpu_cores()
    show.rates(screen, found, rates, wanted)
    formats = [needs.Format("as they are", rates.decoding)]
    if rates.smaller:
        source = shlex.quote(found.uri)
        how = f"python -m distdl prepare folder --source {source} --to OUT --short-side 256"
        if found.kind != "folders of images":
            how = "python -m distdl prepare ... --short-side 256 --quality 90, from the originals"
        formats.append(needs.Format("with a short side of 256, quality 90", rates.smaller, how))
    verdict = needs.judge(wanted, formats, rates.reading, cores or 1, gpus)
    show.needs(screen, formats, wanted, cores or 1, gpus)
    workers = min(needs.workers_for(wanted.rate, rates.decoding), (cores or 1) // gpus or 1)
    memory = needs.shm(workers, gpus, options.batch_size, options.image_size)
    show.shm(screen, memory, workers, options.batch_size)
    screen.line("verdict", verdict.text)
    if verdict.before:
        screen.line("first", verdict.before)
    here = [o for o in verdict.overrides if resources.visible_gpus() or "nvjpeg" not in o]
    screen.line("next", next_command(found, here))
    return 1 if any(s.damaged for s in seen.values()) else 0


def inspect(found: Any, options: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Looks at images of each split, and measures rates on the first one that has some.

    Raises:
        StoreError: A shard cannot be downloaded.
    """
    from distdl.commands import _data_images, _data_rates
    from distdl.prepare.bar import Bar

    rates, seen = None, {}
    for name, images in found.splits.items():
        if not len(images.labels) or (options.all and rates is not None):
            continue
        shard, rows = some(images, options.sample, found.store is not None)
        with found.reading(images, shard) as reader:
            if rates is None:
                rates = _data_rates.measure(reader, rows, options.image_size)
            if not options.all:
                seen[name] = _data_images.look(reader, rows)
    if options.all:
        total, done = sum(len(images.labels) for images in found.splits.values()), 0
        with Bar("looking at every image") as bar:

            def progress(count: int) -> None:
                nonlocal done
                done += count
                bar(done, total, f"{done:,} of {total:,}")

            seen = _data_images.look_at_all(found, os.cpu_count() or 1, progress)
    return seen, rates


def some(images: Any, count: int, remote: bool) -> tuple[int | None, Any]:
    """Evenly spread images; of what must be downloaded, of one shard, the middle one."""
    shard, rows = None, np.arange(len(images.labels))
    if remote:
        shard = len(images.names) // 2
        rows = np.flatnonzero(images.where["shard"] == shard)
    places = np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)
    return shard, rows[places]


def gpu_of_this_machine() -> str | None:
    """The name in our table of the first GPU here, None if it has none that is known."""
    import shutil
    import subprocess

    from distdl.commands._data_needs import GPUS

    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout.lower()
    return next((name for name in GPUS if name in shown), None)


def next_command(found: Any, overrides: Sequence[str]) -> str:
    """A training on this data."""
    classes = len(found.classes)
    what = "+experiment=resnet50_imagenet"
    if classes != 1000:
        what = f"data=imagenet data.num_classes={classes}"
    return " ".join(["python -m distdl", what, override("data.root", found.uri), *overrides])
