"""The end of `prepare`: prints the next command, or why the data cannot be trained on yet."""

from __future__ import annotations

import argparse
import re
import shlex

from distdl.tools.prepare.work import Preparation
from distdl.util.screen import say

NAMES = {"train": "training", "val": "validation", "test": "test"}
# What trains on a data set, by the kind of its source.
TRAIN = {"imagenet": "+experiment=resnet50_imagenet", "coco": "+experiment=maskrcnn_coco"}


def print_next(options: argparse.Namespace, kind: str, work: Preparation) -> None:
    where = options.upload.partition("?")[0] if options.upload else str(options.to)
    classes = work.class_count()
    empty = work.empty_splits()
    usual = {"imagenet": 1000, "coco": 80}.get(kind, 1000)
    number = "" if classes == usual else f" data.num_classes={classes}"
    say(f"check: python -m distdl data check {shlex.quote(where)}")
    for split in empty:
        damaged = work.damaged(split)
        state = f"all damaged ({damaged:,})" if damaged else "missing"
        remedy = "replace them, and prepare them into a new folder"
        say(f"next:  no training yet: {NAMES[split]} images are {state}")
        say(f"       {remedy if damaged else how_to_provide(split, kind)}")
    root = override("data.root", where)
    if not empty:
        say(f"next:  python -m distdl {TRAIN.get(kind, 'data=imagenet')} {root}{number}")
    if work.has_test():
        say(f"       python -m distdl resume RUN task=predict {root} data.predict_split=test")


def how_to_provide(split: str, kind: str) -> str:
    """How to provide images for a split that is empty in the source."""
    if kind == "coco":
        return f"name its annotation file: --{split} JSON, and prepare all splits into a new folder"
    if kind not in ("tfrecord", "parquet"):
        return f"the source must give samples whose split is {split}"
    other = NAMES[split]
    return (
        f"name the files that hold them {other}-*, or put them into a folder {other}/ "
        "(or --split, for all files), and prepare both splits into one new folder"
    )


def override(key: str, value: str) -> str:
    """`key=value`, quoted for pasting: outer quotes for the shell, inner ones for Hydra."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        plain = OverridesParser.create().parse_override(f"{key}={value}").value() == value
    except HydraException:
        plain = False
    if not plain:
        # Hydra reads backslashes in pairs before a quote, and before the end of the value.
        doubled = re.sub(r'(\\+)(?="|$)', r"\1\1", value)
        value = '"' + doubled.replace('"', '\\"') + '"'
    return shlex.quote(f"{key}={value}")
