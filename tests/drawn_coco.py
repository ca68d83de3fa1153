"""A small data set in COCO's format: shapes drawn on smooth noise, or on photographs.

`python -m tests.drawn_coco FOLDER [--train N] [--val N] [--seed N] [--photographs FOLDER]` writes

    FOLDER/annotations/instances_{train,val}2017.json
    FOLDER/{train,val}2017/000000001000.jpg ...

with what makes real sets hard: ids of categories with gaps, objects of several polygons, crowds as
runs of pixels, images without objects, objects cut by the border or a few pixels small, objects of
every size class of COCO, and images of several shapes. Equal arguments give equal bytes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from tests.miniature import encoded, photograph

# COCO's ids have gaps. Each shape has a colour of its own, more or less.
CATEGORIES = {1: "disc", 3: "square", 18: "triangle", 44: "cross", 90: "ring"}
COLOURS = {
    1: (220, 60, 50),
    3: (60, 90, 220),
    18: (60, 190, 80),
    44: (230, 200, 60),
    90: (200, 70, 200),
}
SIZES = ((96, 96), (128, 96), (96, 128), (128, 64), (64, 128), (112, 80), (80, 112), (72, 64))
SPLITS = ("train", "val")
FIRST_ID = {"train": 1000, "val": 500_000}  # of an image
EMPTY_EVERY, CROWD_EVERY, TINY_EVERY, CUT_EVERY, LARGE_EVERY = 10, 8, 5, 4, 12
POINTS = 17  # keypoints of a disc: COCO's number, for which it has sigmas

Polygon = list[tuple[float, float]]


@dataclass
class Shape:
    """An object: what it covers, as polygons that do not overlap."""

    category: int
    polygons: list[Polygon]
    points: Polygon = field(default_factory=list)

    @property
    def box(self) -> tuple[float, float, float, float]:
        """x, y, width, height."""
        xs = [x for polygon in self.polygons for x, _ in polygon]
        ys = [y for polygon in self.polygons for _, y in polygon]
        return min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)

    def clipped(self, width: int, height: int) -> Shape:
        inside = [clip(polygon, width, height) for polygon in self.polygons]
        return Shape(self.category, [each for each in inside if len(each) > 2], self.points)

    def mask(self, width: int, height: int) -> np.ndarray[Any, Any]:
        """uint8 [height, width]."""
        image = Image.new("L", (width, height))
        for polygon in self.polygons:
            ImageDraw.Draw(image).polygon(polygon, fill=1)
        return np.array(image)


def draw(
    root: Path,
    train: int = 40,
    val: int = 20,
    seed: int = 0,
    photographs: Path | None = None,
    keypoints: bool = False,
) -> Path:
    """Writes the data set, and returns its folder.

    Args:
        train, val: Numbers of images.
        photographs: A folder with images, below which crops are taken as backgrounds; None: noise.
        keypoints: Also write person_keypoints_*.json: the discs alone, each with 17 points.
    """
    files = sorted(photographs.rglob("*.[jJ][pP]*[gG]")) if photographs else []
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for split, count in zip(SPLITS, (train, val), strict=True):
        folder = root / f"{split}2017"
        folder.mkdir(exist_ok=True)
        images, annotations = [], []
        for number in range(count):
            rng = np.random.default_rng((seed, SPLITS.index(split), number))
            identity = FIRST_ID[split] + 3 * number
            picture, found = scene(rng, number, files)
            name = f"{identity:012}.jpg"
            (folder / name).write_bytes(encoded(picture, quality=92))
            width, height = picture.size
            images.append({"id": identity, "file_name": name, "width": width, "height": height})
            annotations += [{**each, "image_id": identity} for each in found]
        for identity, annotation in enumerate(annotations, FIRST_ID[split] * 10 + 7):
            annotation["id"] = identity
        _write(root, f"instances_{split}2017", images, annotations, keypoints=False)
        if keypoints:
            _write(root, f"person_keypoints_{split}2017", images, annotations, keypoints=True)
    return root


def scene(
    rng: np.random.Generator, number: int, files: Sequence[Path]
) -> tuple[Image.Image, list[dict[str, Any]]]:
    """An image, and its annotations without ids."""
    width, height = SIZES[int(rng.integers(len(SIZES)))]
    picture = background(rng, width, height, files)
    if number % EMPTY_EVERY == EMPTY_EVERY - 1:
        return picture, []
    shapes: list[Shape] = []
    annotations = []
    if number % CROWD_EVERY == 1:
        annotations.append(_crowd(rng, picture))
        x, y, w, h = annotations[0]["bbox"]
        shapes.append(Shape(0, [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)]]))
    sizes = [float(radius) for radius in rng.integers(9, 22, int(rng.integers(2, 5)))]
    if number % LARGE_EVERY == 0:
        width, height = 128, 128
        picture = background(rng, width, height, files)
        sizes = [57.0, *sizes[:1]]
    if number % TINY_EVERY == 2:
        sizes.append(3.0)
    for index, radius in enumerate(sizes):
        cut = number % CUT_EVERY == 3 and index == 0
        category = int(rng.choice(list(CATEGORIES)))
        if radius > 50:  # only a disc of that size covers the 96 x 96 pixels of a large object
            category = 1
        for _ in range(20):
            x, y = rng.uniform(0, width), rng.uniform(0, height)
            if cut:
                x, y = (0.0, y) if rng.random() < 0.5 else (x, 0.0)
            else:
                x = min(max(x, radius), max(width - radius, radius))
                y = min(max(y, radius), max(height - radius, radius))
            shape = _shape(category, x, y, radius, rng).clipped(width, height)
            if not any(_overlap(shape.box, other.box) > 0.1 for other in shapes):
                break
        else:
            continue
        shapes.append(shape)
        _paint(picture, shape, rng)
        annotations.append(_annotation(shape, width, height))
    return picture, annotations


def background(
    rng: np.random.Generator, width: int, height: int, files: Sequence[Path]
) -> Image.Image:
    if not files:
        smooth = photograph(int(rng.integers(1 << 30)), width, height)
        noise = rng.integers(-20, 21, (height, width, 3))
        pixels = np.clip(np.asarray(smooth, dtype=np.int64) // 2 + 60 + noise, 0, 255)
        return Image.fromarray(pixels.astype(np.uint8))
    with Image.open(files[int(rng.integers(len(files)))]) as file:
        whole = file.convert("RGB")
    scale = max(1.0, width / whole.width, height / whole.height)
    whole = whole.resize((math.ceil(whole.width * scale), math.ceil(whole.height * scale)))
    x = int(rng.integers(whole.width - width + 1))
    y = int(rng.integers(whole.height - height + 1))
    return whole.crop((x, y, x + width, y + height))


def _shape(category: int, x: float, y: float, radius: float, rng: np.random.Generator) -> Shape:
    turn = float(rng.uniform(0, 2 * math.pi))
    name = CATEGORIES[category]
    if name == "disc":
        outline = _arc(x, y, radius, turn, 2 * math.pi, POINTS - 1)
        return Shape(category, [outline], [(x, y), *outline])
    if name == "square":
        return Shape(category, [_arc(x, y, radius, turn, 2 * math.pi, 4)])
    if name == "triangle":
        return Shape(category, [_arc(x, y, radius, turn, 2 * math.pi, 3)])
    if name == "ring":  # of two polygons, as a polygon of COCO has no holes
        halves = []
        for begin in (turn, turn + math.pi):
            outer = _arc(x, y, radius, begin, math.pi, 9, closed=True)
            inner = _arc(x, y, radius * 0.55, begin, math.pi, 9, closed=True)
            halves.append(outer + inner[::-1])
        return Shape(category, halves)
    arm = radius
    thick = radius / 3
    corners = ((thick, -arm), (thick, -thick), (arm, -thick))
    quarters = [turn + step * math.pi / 2 for step in range(4)]
    outline = [_turned(across, along, each, x, y) for each in quarters for across, along in corners]
    return Shape(category, [outline])


def _arc(
    x: float, y: float, radius: float, begin: float, angle: float, count: int, closed: bool = False
) -> Polygon:
    steps = count - 1 if closed else count
    angles = [begin + angle * step / steps for step in range(count)]
    return [(x + radius * math.cos(each), y + radius * math.sin(each)) for each in angles]


def _turned(across: float, along: float, angle: float, x: float, y: float) -> tuple[float, float]:
    cos = math.cos(angle)
    sin = math.sin(angle)
    return x + across * cos - along * sin, y + across * sin + along * cos


def clip(polygon: Polygon, width: int, height: int) -> Polygon:
    """The part of a polygon inside the image (Sutherland and Hodgman 1974)."""
    for axis, limit, sign in ((0, 0.0, 1), (1, 0.0, 1), (0, width, -1), (1, height, -1)):
        kept: Polygon = []
        for before, point in zip([polygon[-1], *polygon], polygon, strict=False):
            # How far inside this edge of the image the two points are.
            was = sign * (before[axis] - limit)
            now = sign * (point[axis] - limit)
            if (was >= 0) != (now >= 0):
                share = was / (was - now)
                x = before[0] + share * (point[0] - before[0])
                y = before[1] + share * (point[1] - before[1])
                kept.append((x, y))
            if now >= 0:
                kept.append(point)
        polygon = kept
        if not polygon:
            break
    return polygon


def _overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """The shared area of two boxes over that of the smaller one."""
    width = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    height = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    smaller = min(one[2] * one[3], other[2] * other[3])
    return max(width, 0.0) * max(height, 0.0) / max(smaller, 1e-9)


def _paint(picture: Image.Image, shape: Shape, rng: np.random.Generator) -> None:
    colour = tuple(int(c + rng.integers(-25, 26)) % 256 for c in COLOURS[shape.category])
    for polygon in shape.polygons:
        ImageDraw.Draw(picture).polygon(polygon, fill=colour)


def _annotation(shape: Shape, width: int, height: int) -> dict[str, Any]:
    polygons = [[round(v, 2) for xy in polygon for v in xy] for polygon in shape.polygons]
    annotation = {
        "category_id": shape.category,
        "iscrowd": 0,
        "bbox": [round(v, 2) for v in shape.box],
        "area": float(shape.mask(width, height).sum()),
        "segmentation": polygons,
    }
    if shape.points:
        annotation["keypoints"] = [*_keypoints(shape.points, width, height)]
    return annotation


def _keypoints(points: Polygon, width: int, height: int) -> Iterator[float]:
    """x, y and 2 for each point in the image, three zeros for others."""
    for x, y in points:
        seen = 0 <= x < width and 0 <= y < height
        yield from (round(x, 2), round(y, 2), 2) if seen else (0, 0, 0)


def _crowd(rng: np.random.Generator, picture: Image.Image) -> dict[str, Any]:
    """Many small discs, with one annotation of runs of pixels."""
    width, height = picture.size
    mask = np.zeros((height, width), dtype=np.uint8)
    left, top = rng.uniform(5, width / 2), rng.uniform(5, height / 2)
    for _ in range(8):
        x, y = left + rng.uniform(0, width / 2.5), top + rng.uniform(0, height / 2.5)
        shape = _shape(1, float(x), float(y), 4.0, rng).clipped(width, height)
        _paint(picture, shape, rng)
        mask |= shape.mask(width, height)
    ys, xs = np.nonzero(mask)
    box = [xs.min(), ys.min(), xs.max() - xs.min() + 1, ys.max() - ys.min() + 1]
    return {
        "category_id": 1,
        "iscrowd": 1,
        "bbox": [float(v) for v in box],
        "area": float(mask.sum()),
        "segmentation": {"size": [height, width], "counts": runs(mask)},
    }


def runs(mask: np.ndarray[Any, Any]) -> list[int]:
    """COCO's uncompressed runs, column by column: of zeros, of ones, of zeros, ..."""
    flat = np.concatenate(([0], mask.flatten(order="F"), [2]))
    ends = np.flatnonzero(np.diff(flat))
    counts = [int(n) for n in np.diff(np.concatenate(([0], ends)))]
    return counts if mask[0, 0] == 0 else [0, *counts[1:]]


def _write(
    root: Path, name: str, images: list[Any], annotations: list[dict[str, Any]], keypoints: bool
) -> None:
    kept = [dict(each) for each in annotations]
    categories: list[dict[str, Any]] = [
        {"id": identity, "name": word, "supercategory": "shape"}
        for identity, word in CATEGORIES.items()
    ]
    if keypoints:
        kept = [each for each in kept if each["category_id"] == 1]
        for each in kept:
            points = each.setdefault("keypoints", [0] * 3 * POINTS)
            each["num_keypoints"] = sum(seen > 0 for seen in points[2::3])
        names = [f"point {number}" for number in range(POINTS)]
        categories = [{**categories[0], "keypoints": names, "skeleton": [[1, 2]]}]
    else:
        for each in kept:
            each.pop("keypoints", None)
    content = {
        "info": {"description": "drawn by tests/drawn_coco.py"},
        "licenses": [],
        "images": images,
        "annotations": kept,
        "categories": categories,
    }
    (root / f"annotations/{name}.json").write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=40)
    parser.add_argument("--val", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--keypoints", action="store_true")
    chosen = parser.parse_args()
    draw(chosen.folder, chosen.train, chosen.val, chosen.seed, chosen.photographs, chosen.keypoints)
