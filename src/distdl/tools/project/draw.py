"""A few drawn images in the formats of real data sets, so that a new project trains at once."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Mapping

from PIL import Image, ImageDraw

CLASSES = ("disc", "square", "triangle")
SPLITS = ("train", "val")
_CORNERS = {"square": 4, "triangle": 3}
Box = tuple[float, float, float, float]


def classes(train: int = 16, val: int = 8, size: int = 40, seed: int = 0) -> dict[str, bytes]:
    """Files below a folder: `train/disc/0.png`, one shape on each.

    Args:
        train, val: Images of each class.
        size: Of an image, in pixels.
    """
    rng = random.Random(seed)
    files = {}
    for split, count in zip(SPLITS, (train, val), strict=True):
        for name in CLASSES:
            for number in range(count):
                image = _background(rng, size)
                _draw(image, name, rng, size * 0.45)
                files[f"{split}/{name}/{number}.png"] = _png(image)
    return files


def objects(train: int = 24, val: int = 8, size: int = 96, seed: int = 0) -> dict[str, bytes]:
    """Files below a folder in COCO's format, with boxes: one to three shapes on each image.

    Args:
        train, val: Images.
        size: Of an image, in pixels.
    """
    rng = random.Random(seed)
    files = {}
    for split, count in zip(SPLITS, (train, val), strict=True):
        images, annotations = list[Mapping[str, object]](), list[Mapping[str, object]]()
        for number in range(1, count + 1):
            image = _background(rng, size)
            name = f"{number:06}.png"
            images.append({"id": number, "file_name": name, "width": size, "height": size})
            for _ in range(rng.randint(1, 3)):
                category = rng.randrange(len(CLASSES))
                left, top, width, height = _draw(image, CLASSES[category], rng, size * 0.22)
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": category + 1,
                        "bbox": [left, top, width, height],
                        "area": width * height,
                        "iscrowd": 0,
                    }
                )
            files[f"{split}2017/{name}"] = _png(image)
        categories = [{"id": n, "name": name} for n, name in enumerate(CLASSES, 1)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        files[f"annotations/instances_{split}2017.json"] = json.dumps(content).encode()
    return files


def _background(rng: random.Random, size: int) -> Image.Image:
    image = Image.new("RGB", (size, size), _colour(rng, 0, 90))
    for _ in range(6):  # of other greys, so that a colour alone gives nothing away
        x, y = rng.randrange(size), rng.randrange(size)
        ImageDraw.Draw(image).rectangle((x, y, x + size // 4, y + 3), fill=_colour(rng, 0, 90))
    return image


def _draw(image: Image.Image, name: str, rng: random.Random, largest: float) -> Box:
    """Draws a shape, and returns its left, top, width and height."""
    radius = rng.uniform(0.6, 1) * largest
    x, y = (rng.uniform(radius, image.width - radius) for _ in "xy")
    fill = _colour(rng, 140, 255)
    if name == "disc":
        left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
        ImageDraw.Draw(image).ellipse((left, top, right, bottom), fill=fill)
    else:
        turn = rng.uniform(0, 2 * math.pi)
        count = _CORNERS[name]
        angles = [turn + 2 * math.pi * corner / count for corner in range(count)]
        points = [(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles]
        ImageDraw.Draw(image).polygon(points, fill=fill)
        left, right = min(point[0] for point in points), max(point[0] for point in points)
        top, bottom = min(point[1] for point in points), max(point[1] for point in points)
    box = (round(left, 1), round(top, 1), round(right - left, 1), round(bottom - top, 1))
    return box


def _colour(rng: random.Random, least: int, most: int) -> tuple[int, int, int]:
    return rng.randint(least, most), rng.randint(least, most), rng.randint(least, most)


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
