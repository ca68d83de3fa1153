"""Finds record files (TFRecord, Parquet) and their splits, and interprets their labels."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distdl.datasets.left_out import LeftOut
from distdl.stores.walking import walk_once
from distdl.tools.prepare.source import Sample
from distdl.util.errors import UserError

# Words in a path that name a split, as in the files of Inception ("validation-00000-of-00128"),
# TFDS ("imagenet2012-train.tfrecord-00000-of-01024") and Hugging Face
# ("data/train-00000-of-00294.parquet").
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "eval", "dev"),
    # Test sets have no labels, or serve a final evaluation: they are left out.
    "": ("test", "testing"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--split", choices=("train", "val"), help="the split of all files, whatever their names"
    )
    parser.add_argument(
        "--label-offset",
        type=int,
        metavar="N",
        help="subtracted from every label (default: the smallest one, if that is 0 or 1)",
    )


def find_files(
    source: Path, names: str, shown: str, split: str | None, left_out: LeftOut
) -> tuple[Path, dict[str, str]]:
    """A folder, and its record files with the split of each: "train" or "val".

    Args:
        source: The folder, or one file in it. Subfolders are searched, too.
        names, shown: A regular expression that is searched for in file names; the same in words.
        split: The split of all files; None: from the names of the files or their folders.
        left_out: Counts the other files, those of a test set and empty ones.

    Raises:
        UserError: There is no such file, or a file's name does not show its split.
    """
    if not source.exists():
        raise UserError.at("--source", what=f"no such folder: {source}", code="not-found")
    folder = source if source.is_dir() else source.parent
    files = sorted(_below(folder, names, left_out)) if source.is_dir() else [source.name]
    if not files:
        raise UserError.at(
            "--source", what=f"{source} holds no file named {shown}", code="incomplete"
        )
    if split is not None:
        return folder, dict.fromkeys(files, split)
    splits = {name: split_of(name) for name in files}
    for name, named in splits.items():
        if named is None:
            raise UserError.at(
                "--source",
                what=f"{folder / name} has neither train nor validation in its name",
                remedy="--split train, if all files are for training",
                code="incomplete",
            )
    if not any(splits.values()):
        raise UserError.at(
            "--source",
            what=f"{source} holds files of a test set only",
            remedy="--split val, to validate with them",
            code="incomplete",
        )
    for name in (name for name, named in splits.items() if not named):
        left_out.add(name, "of a test set")
    return folder, {name: named for name, named in splits.items() if named}


def split_of(path: str) -> str | None:
    """The split in the words of a path: "train", "val", "" for a test set; None: there is none.

    The file's own name takes precedence over the folders above it.
    """
    for part in reversed(Path(path).parts):
        words = set(re.split(r"[^a-z]+", part.lower()))
        for split, synonyms in SPLITS.items():
            if words & set(synonyms):
                return split
    return None


def _below(folder: Path, names: str, left_out: LeftOut) -> Iterator[str]:
    def kind(path: str) -> str | None:  # a linked folder is entered once per split
        return split_of(os.path.relpath(path, folder))

    for inner, folders, files in walk_once(folder, kind=kind):
        # Skip hidden files, and those of Spark and Petastorm: _common_metadata, _SUCCESS.
        folders[:] = [f for f in folders if not f.startswith((".", "_"))]
        for name in files:
            if name.startswith((".", "_")):
                continue
            if re.search(names, name):
                yield os.path.relpath(Path(inner, name), folder)
            else:
                left_out.add(name, "named otherwise")


def no_class(sample: str, label: int) -> UserError:
    return UserError.at(
        "--source",
        what=f"{sample} has the label {label}, which no class has",
        remedy=(
            "test sets have such labels: leave that file out, or give it a name with `test` in it"
        ),
        code="mismatch",
    )


def describe(kind: str, folder: Path, files: Mapping[str, str]) -> dict[str, Any]:
    """A source's kind, and the split and size in bytes of each file."""
    sizes = {name: [split, (folder / name).stat().st_size] for name, split in files.items()}
    return {"kind": kind, "files": sizes}


class Labelled:
    """Samples of a scan. The meaning of a label is known only at the end of the scan."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._names: dict[int, str] = {}
        self._offset = 0

    def add(self, sample: Sample, class_name: str = "") -> None:
        """Adds a sample with the label in the file; gives it a name if it has none.

        Raises:
            UserError: An earlier sample had another class name for that label.
        """
        known = self._names.setdefault(sample.label, class_name) if class_name else ""
        if known != class_name:
            raise UserError.at(
                "--source",
                what=(
                    f"{sample.where[0]}: label {sample.label} is {class_name}, "
                    f"and {known} elsewhere"
                ),
                code="mismatch",
            )
        name = sample.name or f"{sample.split}_{len(self._samples):08d}"
        self._samples.append(replace(sample, name=name))

    def settle(self, offset: int | None, names: Sequence[str] | None = None) -> list[str]:
        """Finds the offset to subtract from every label, so that labels start at 0.

        Inception's TFRecords count from 1, since 0 was "background"
        (https://github.com/tensorflow/models/blob/master/research/inception/inception/data/build_imagenet_data.py).
        `offset` None: the smallest label, if that is 0 or 1. `names` are those of all classes, by
        label; None: the names that were added with the samples. Returns the class names.

        Raises:
            UserError: There is no sample, the smallest label does not fit, or two classes have
                the same name.
        """
        if not self._samples:
            raise UserError.at("--source", what="its files hold no sample", code="incomplete")
        known = dict(enumerate(names)) if names else self._names
        labels = {sample.label for sample in self._samples}
        if names:
            labels |= {0, len(names) - 1}
        low = min(labels)
        high = max(labels)
        if offset is None and low > 1:
            raise UserError.at(
                "--label-offset",
                what=f"labels go from {low} to {high}; do they count from 0 or from 1?",
                remedy="--label-offset 0, or 1",
                code="ambiguous",
            )
        self._offset = offset = low if offset is None else offset
        if low < offset:
            raise UserError.at(
                "--label-offset",
                what=f"is {offset}, but a sample has the label {low}",
                remedy=f"--label-offset {low}",
                code="mismatch",
            )
        classes = [known.get(label, str(label - offset)) for label in range(offset, high + 1)]
        twice = sorted({name for name in classes if classes.count(name) > 1})
        if twice:
            raise UserError.at(
                "--source",
                what=f"two labels have the name {twice[0]}",
                remedy="labels and names contradict each other",
                code="ambiguous",
            )
        return classes

    def samples(self) -> Iterator[Sample]:
        """Yields the samples in the order of `add`, with labels from 0. Works only once.

        It drops each sample as it yields it, to save memory: the caller keeps a million of them.
        """
        self._samples.reverse()
        while self._samples:
            sample = self._samples.pop()
            yield replace(sample, label=sample.label - self._offset)
