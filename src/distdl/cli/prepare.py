"""`python -m distdl prepare KIND --source DIR --to OUT`: images as shards, checked, in parallel.

Each image is decoded once. The same command continues interrupted work. See docs/data/prepare.md.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from distdl.cli.arguments import Parser, not_empty
from distdl.config.resources import cpu_cores
from distdl.datasets.image_headers import MOST_PIXELS
from distdl.tools.prepare import interrupts
from distdl.tools.prepare.images import DEFAULT_QUALITY, SUBSAMPLINGS
from distdl.tools.prepare.prepare import run
from distdl.tools.prepare.source import KINDS
from distdl.tools.prepare.writers import FORMATS
from distdl.util.answers import Answer
from distdl.util.errors import UserError
from distdl.util.screen import say
from distdl.util.suggest import closest

COMMAND = "python -m distdl prepare"


@dataclass(frozen=True)
class PreparedData:
    """A data set, which `distdl data check` describes."""

    SCHEMA: ClassVar[str] = "prepare/1"

    folder: str
    written: bool
    """False for --dry-run."""
    uploaded: str
    """Where to; empty if it stays here."""


def main(argv: Sequence[str]) -> Answer:
    """Prepares one data set."""
    with interrupts.raised():
        module, rest = kind_of(list(argv))
        options = parse(module, rest)
        run(options, module)
    written = not options.dry_run
    return Answer(PreparedData(str(options.to), written, options.upload or ""))


def kind_of(argv: list[str]) -> tuple[ModuleType, list[str]]:
    """The module of a source, and the arguments after its name."""
    shown = [f"{COMMAND} {name:9} {text}" for name, (_, text) in KINDS.items()]
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        say("\n".join((f"{__doc__}", *shown, "", f"options: {COMMAND} imagenet --help")))
        raise SystemExit(0)
    if name[:1] in ("", "-"):
        raise UserError.at(
            "prepare",
            what="the first word names the source",
            remedy="\n    ".join(shown),
            code="missing-key",
        )
    if name not in KINDS and "." not in name:
        near = closest(name, KINDS)
        raise UserError.at(
            name,
            what="is not a kind of source",
            remedy=f"did you mean: {COMMAND} {near} ..." if near else "\n    ".join(shown),
            code="wrong-choice",
        )
    path = KINDS[name][0] if name in KINDS else name
    try:
        return importlib.import_module(path), argv[1:]
    except ImportError as error:
        raise UserError.at(name, what=f"cannot import {path}: {error}", code="failed") from error


def parse(module: ModuleType, argv: list[str]) -> argparse.Namespace:
    name = module.__name__.rpartition(".")[2]
    name = name if name in KINDS else module.__name__
    parser = Parser(f"{COMMAND} {name}", description=module.__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    layout = "shards (the default), or folder: OUT/train/<class>/*.jpg"
    quality = f"re-encode all JPEGs (by default only scaled images, at {DEFAULT_QUALITY}); lossy"
    colours = "of the colours of what is encoded again (420, as PIL does)"
    limit = f"an image with more pixels counts as damaged ({MOST_PIXELS:,})"
    cores = cpu_cores()
    parser.add_argument(
        "--source", type=not_empty, required=True, metavar="DIR", help="where the images are"
    )
    parser.add_argument(
        "--to",
        type=not_empty,
        required=True,
        metavar="OUT",
        help="a new folder, or an unfinished one",
    )
    parser.add_argument("--format", choices=FORMATS, default="shards", help=layout)
    parser.add_argument(
        "--shard-mb", type=float, default=128, metavar="MB", help="size of a shard (128)"
    )
    parser.add_argument(
        "--max-side", type=int, metavar="N", help="scale the longer side down to N pixels; lossy"
    )
    parser.add_argument(
        "--short-side", type=int, metavar="N", help="scale the shorter side down to N pixels; lossy"
    )
    parser.add_argument("--quality", type=int, metavar="Q", help=quality)
    parser.add_argument("--subsampling", choices=SUBSAMPLINGS, help=colours)
    parser.add_argument(
        "--raw-fraction",
        type=float,
        default=0.0,
        metavar="P",
        help="a share of the images, from 0 to 1, as pixels: no decoding, ten times the bytes",
    )
    parser.add_argument("--max-pixels", type=int, default=MOST_PIXELS, metavar="N", help=limit)
    parser.add_argument(
        "--skip-damaged", action="store_true", help="leave out images that cannot be decoded"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order of the training images (0)"
    )
    parser.add_argument(
        "--workers", type=int, default=cores, metavar="N", help=f"number of processes ({cores})"
    )
    parser.add_argument(
        "--upload",
        type=not_empty,
        metavar="URL",
        help="also upload: azure://container/path, s3://...",
    )
    parser.add_argument(
        "--append", action="store_true", help="add the images to the data set that OUT is"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    module.add_options(parser)
    options = parser.parse_args(argv)
    options.source = Path(options.source).expanduser()
    return options
