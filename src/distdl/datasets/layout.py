"""What is wrong with the layout of a folder of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distdl.datasets.image_headers import FORMATS
from distdl.datasets.left_out import NO_IMAGE, LeftOut
from distdl.util.errors import Problem
from distdl.util.wording import first_few

# The folder with train/ and val/ of Kaggle's imagenet-object-localization-challenge.zip.
KAGGLE = "ILSVRC/Data/CLS-LOC"


def different_classes(path: str, train: Sequence[str], val: Sequence[str]) -> Problem:
    """The problem of a `path` whose two splits have different class folders."""
    differing = sorted(set(train) ^ set(val))
    classes = f"train/ has {len(train)} classes and val/ {len(val)}"
    return Problem(
        path,
        what=f"{classes}; only one of the two has {first_few(differing)}",
        remedy="both need the same class folders, or labels would differ in meaning",
        code="mismatch",
    )


def no_image(folder: Path, left_out: LeftOut) -> tuple[str, str]:
    """The problem and the remedy of a class folder that holds no image."""
    others = left_out.of(NO_IMAGE)
    what = f"{folder} holds no image"
    if others:
        what += f" (left out so far: {others})"
    return what, f"{', '.join(FORMATS)} are read"


def kaggle_below(folder: Path) -> Path | None:
    """The folder with train/ and val/ in Kaggle's layout, of which val/ has no class folders, at or
    below a folder; None: there is none."""
    parts = KAGGLE.split("/")
    for number in range(len(parts) + 1):
        inner = folder.joinpath(*parts[number:])
        if (inner / "train").is_dir() and next(inner.glob("val/ILSVRC2012_val_*"), None):
            return inner
    return None
