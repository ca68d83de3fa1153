"""The rows of a detector's predictions: one for each detection, and COCO's result JSON of all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from distdl.domains.detection.categories import Categories
from distdl.domains.detection.detections import CocoResult, Detections
from distdl.domains.rows import Columns, Predicted, PredictedRows, Row, RowTable
from distdl.util.atomic_files import atomic_file

# COCO's program takes one file for each kind of result.
BOX = "bbox"
FILES = {BOX: "coco_bbox.json", "mask": "coco_segm.json", "keypoints": "coco_keypoints.json"}


@dataclass(frozen=True)
class PredictedObjects:
    """What a detector's `predict_step` returns: the detections in each image of a batch, and the
    categories of their labels."""

    images: Sequence[Detections]
    categories: Categories


class DetectionRows(PredictedRows):
    """Of each detection its image, `category_id` and `category`, `score`, the box as `x`, `y`,
    `width` and `height` in pixels, and, where the network gives them, the `mask` as COCO's RLE
    (JSON) and the `keypoints` (x, y and visibility of each). An image in which nothing was found
    has no row; one that is damaged has a row with its `error`.
    """

    uniform = False

    def __init__(self, named: bool) -> None:
        super().__init__(named)
        self.categories = Categories((), ())

    def of_batch(self, outputs: object, size: int) -> Columns:
        """`outputs`: `PredictedObjects`."""
        found = cast(PredictedObjects, outputs)
        self.categories = found.categories
        images = np.empty(size, dtype=object)
        images[:] = [*found.images]
        return {"found": images}

    def table(self, columns: dict[str, np.ndarray], samples: Predicted) -> RowTable:
        images: list[Detections] = [*columns["found"]]
        damaged = np.zeros(len(images), bool) if samples.errors is None else samples.errors != ""
        counts = [0 if bad else len(each) for each, bad in zip(images, damaged, strict=True)]
        # A damaged image has one row, without a detection.
        repeats = np.where(damaged, 1, counts)
        missing_of = np.repeat(damaged, repeats)
        whose: dict[str, np.ndarray] = {"index": samples.indices}
        if samples.names is not None:
            whose = {"name": samples.names, **samples.known}
        rows = {name: np.repeat(values, repeats, axis=0) for name, values in whose.items()}
        found = _columns(images, damaged.tolist(), self.categories)
        rows |= found
        missing = dict.fromkeys(found, missing_of)
        if samples.errors is not None:
            rows["error"] = np.repeat(samples.errors, repeats)
            missing["error"] = ~missing_of
        totals = {
            "samples": len(images),
            "detections": sum(counts),
            "damaged": int(damaged.sum()),
        }
        return RowTable(rows, missing, totals)

    def metrics(self, counts: Mapping[str, int], samples: int) -> dict[str, float]:
        found = float(counts.get("detections", 0))
        return {**super().metrics(counts, samples), "predict/detections": found}

    def finish(
        self, folder: Path, rows: Callable[[], Iterable[Row]], columns: Sequence[str]
    ) -> list[str]:
        """Writes COCO's result JSON: a file each for boxes, masks and keypoints, an empty list if
        nothing was found. Data whose images have no ids get none."""
        if "image_id" not in columns:
            return []
        written = [kind for kind in FILES if kind == BOX or kind in columns]
        for kind in written:
            with atomic_file(folder / FILES[kind]) as file:
                before = b"[\n"
                for result in _results(kind, rows()):
                    file.write(before + json.dumps(result).encode())
                    before = b",\n"
                file.write(b"\n]\n" if before != b"[\n" else b"[]\n")
        return [FILES[kind] for kind in written]


def _results(kind: str, rows: Iterable[Row]) -> Iterator[dict[str, object]]:
    for row in rows:
        if row["score"] in (None, ""):  # a damaged image
            continue
        result = {name: row[name] for name in ("image_id", "category_id", "score")}
        if kind == BOX:
            result["bbox"] = [row[name] for name in ("x", "y", "width", "height")]
        elif kind == "mask":
            mask = row["mask"]
            result["segmentation"] = json.loads(mask) if isinstance(mask, str) else mask
        else:
            result[kind] = row[kind]
        yield result


def _columns(
    images: Sequence[Detections], damaged: Sequence[bool], categories: Categories
) -> dict[str, np.ndarray]:
    """The columns of all detections, in order. A damaged image has a row without one; which columns
    there are does not depend on it."""
    rows: list[CocoResult | None] = []
    for image, bad in zip(images, damaged, strict=True):
        rows += [None] if bad else image.results(0, categories)
    points = [image.keypoints.shape[1] for image in images if image.keypoints is not None]
    names = dict(zip(categories.ids, categories.names, strict=True))
    boxes = np.array([[0.0] * 4 if row is None else row["bbox"] for row in rows]).reshape(-1, 4)
    columns: dict[str, np.ndarray] = {
        "category_id": np.array([row["category_id"] if row else 0 for row in rows], np.int64),
        "category": _texts([names[row["category_id"]] if row else None for row in rows]),
        "score": np.array([row["score"] if row else 0.0 for row in rows], np.float64),
        **{name: boxes[:, place] for place, name in enumerate(("x", "y", "width", "height"))},
    }
    if any(image.masks is not None for image in images):
        columns["mask"] = _texts([json.dumps(row["segmentation"]) if row else None for row in rows])
    if points:
        blank = [0.0] * 3 * points[0]
        seen = [row["keypoints"] if row else blank for row in rows]
        columns["keypoints"] = np.array(seen, np.float64).reshape(len(rows), 3 * points[0])
    return columns


def _texts(values: Sequence[str | None]) -> np.ndarray:
    return np.array([*values, None], dtype=object)[:-1]
