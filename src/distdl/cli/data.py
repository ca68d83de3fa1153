"""`python -m distdl data check URI`: what a data set holds, and whether it feeds the GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from distdl.cli.arguments import Parser
from distdl.datasets.image_headers import MOST_PIXELS
from distdl.util.answers import Answer
from distdl.util.errors import Problem, UserError

EPILOG = """\
URI is what data.root takes: a folder with train/ and val/, a prepared folder, azure://container/path,
abfss://..., https://..., s3://bucket/path. Exit code 1: there are damaged images.

  python -m distdl data check /path/to/imagenet
  python -m distdl data check azure://datasets/imagenet --model resnet50 --gpu a100 --gpus 8
"""


def main(argv: Sequence[str]) -> Answer:
    """Prints one screen; 1 if there are damaged images."""
    parser = Parser("python -m distdl data", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    text = "what a data set holds, how fast it is read here, and whether that feeds the GPUs"
    verb = verbs.add_parser(
        "check",
        help=text,
        description=text,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("uri", metavar="URI", help="where the images are: see below")
    verb.add_argument("--all", action="store_true", help="check every image, not only a sample")
    verb.add_argument(
        "--sample", type=int, default=400, metavar="N", help="number of images to check (400)"
    )
    verb.add_argument("--model", default="resnet50", help="the model to be fed (resnet50)")
    verb.add_argument(
        "--gpu", help="its GPU: k80 ... v100, a100, h100, h200 (this machine's, else h100)"
    )
    verb.add_argument(
        "--gpus", type=int, help="number of GPUs that share this machine's cores (all, or 1)"
    )
    verb.add_argument("--rate", type=float, help="img/s of one GPU in training, if you measured it")
    verb.add_argument("--batch-size", type=int, default=256, help="images per GPU and step (256)")
    verb.add_argument("--image-size", type=int, default=224, help="in pixels (224)")
    verb.add_argument(
        "--profile",
        nargs="?",
        const="",
        metavar="FILE.svg",
        help="the CPU time of each stage of an image, as a table and bars, and as a picture",
    )
    limit = f"an image with more pixels counts as damaged ({MOST_PIXELS:,})"
    verb.add_argument("--max-pixels", type=int, default=MOST_PIXELS, help=limit)
    options = parser.parse_args(argv)
    counts = ("sample", "gpus", "batch_size", "image_size", "max_pixels")
    problems = []
    for name in counts:
        value = getattr(options, name)
        if value is not None and value < 1:
            option = f"--{name.replace('_', '-')}"
            what = f"must be 1 or more, not {value}"
            problems.append(Problem(option, what=what, code="out-of-range"))
    problems += picture_problems(options.profile)
    if problems:
        raise UserError(*problems)
    from distdl.tools.data_check import check

    return check.check(options)


def picture_problems(name: str | None) -> Iterator[Problem]:
    """Why no picture can be written to a file of this name; "" and None: none is wanted."""
    path = Path(name or "bars.svg")
    if path.suffix != ".svg" or path.is_dir():
        yield Problem(
            "--profile",
            what=f"{name} is not the name of an SVG file",
            remedy="--profile bars.svg",
            code="wrong-kind",
        )
    elif not path.parent.is_dir():
        yield Problem(
            "--profile",
            what=f"no such folder: {path.parent}",
            remedy="create it, or name another one",
            code="not-found",
        )
