"""Masks of COCO: polygons, and runs of pixels, column by column (RLE).

Runs are decoded here, and not by pycocotools' C code, which believes their lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distdl.util.errors import UserError

FAR = 4  # how many times the image's sides a polygon may lie away from it
MOST_RUNS = 1 << 24


def wrong(segmentation: object, height: int, width: int) -> str:
    """Why a mask cannot be decoded; "" if it can, or if there is none."""
    if segmentation is None:
        return ""
    try:
        if isinstance(segmentation, Mapping):
            runs(segmentation, height, width)
        else:
            polygons(segmentation, height, width)
    except ValueError as error:
        return str(error)
    return ""


def decode(segmentation: object, height: int, width: int) -> np.ndarray[Any, Any]:
    """The mask of an object, uint8 [H, W], 0 or 1; polygons by COCO's own rule.

    Raises:
        ValueError: It cannot be decoded.
        UserError: The package that draws polygons is not installed.
    """
    if isinstance(segmentation, Mapping):
        counts = runs(segmentation, height, width)
        values = np.arange(len(counts), dtype=np.uint8) & 1
        return np.repeat(values, counts).reshape(width, height).T
    drawn = polygons(segmentation, height, width)
    if not drawn:
        return np.zeros((height, width), np.uint8)
    library = _library()
    merged = library.merge(library.frPyObjects(drawn, height, width))
    return np.ascontiguousarray(library.decode(merged))


def polygons(segmentation: object, height: int, width: int) -> list[list[float]]:
    """The polygons of an object: x, y, x, y, ... in pixels. Raises ValueError."""
    if not isinstance(segmentation, Sequence) or isinstance(segmentation, str):
        raise ValueError("its segmentation is neither polygons nor runs")
    far = FAR * max(height, width)
    drawn = []
    for polygon in segmentation:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            count = len(polygon) if isinstance(polygon, list) else "no list of"
            raise ValueError(f"a polygon has {count} numbers, not three pairs or more")
        points = _numbers(polygon)
        if points is None:
            raise ValueError("a polygon holds what is no number")
        if np.abs(points).max() > far + max(height, width):
            raise ValueError("a polygon lies far outside the image")
        drawn.append(points.tolist())
    return drawn


def _numbers(values: list[object]) -> np.ndarray[Any, Any] | None:
    """Finite numbers, float64 [N]; None: they are something else."""
    try:
        array = np.array(values)
    except ValueError:  # lists of several lengths
        return None
    if array.ndim != 1 or array.dtype.kind not in "if":
        return None
    numbers = array.astype(np.float64)
    return numbers if np.isfinite(numbers).all() else None


def runs(segmentation: Mapping[str, Any], height: int, width: int) -> np.ndarray[Any, Any]:
    """The lengths of runs of zeros, ones, zeros, ..., int64, whose sum is H * W.

    Raises:
        ValueError: They are not of this size, or no lengths.
    """
    size = segmentation.get("size")
    counts = segmentation.get("counts")
    if size != [height, width]:
        what = f"its runs are of the size {str(size)[:40]} (height, width)"
        raise ValueError(f"{what}, the image is {[height, width]}")
    if isinstance(counts, str):
        counts = _unpacked(counts)
    if not isinstance(counts, list) or len(counts) > MOST_RUNS:
        raise ValueError("its runs are no list of lengths")
    if not all(type(count) is int and 0 <= count <= height * width for count in counts):
        raise ValueError("its runs hold what is no length in pixels")
    if sum(counts) != height * width:
        raise ValueError(f"its runs have {sum(counts):,} pixels, the image {height * width:,}")
    return np.array(counts, dtype=np.int64)


def _unpacked(text: str) -> list[int]:
    """The lengths in COCO's text: five bits in each character from "0" on, the lowest first, with a
    bit for "more follows" and the sign of the last; from the fourth on, differences to the length
    before the last."""
    counts: list[int] = []
    value = 0
    shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 50:
            raise ValueError("its runs are no text of COCO's form")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = 0
        shift = 0
    if shift:
        raise ValueError("its runs are cut short")
    return counts


def _library() -> Any:  # noqa: ANN401  (a module)
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise UserError.at(
            "data.masks",
            what=f"masks of polygons need the package faster-coco-eval ({error})",
            remedy="pip install 'distdl[detection]'",
            code="not-installed",
        ) from error
    return mask
