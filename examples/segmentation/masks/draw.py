"""`python -m masks.draw FOLDER`: draws a small data set, discs and squares on noise."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("background", "disc", "square")


def draw(root: Path, train: int = 64, val: int = 21, seed: int = 0) -> None:
    """Draws images of 96 x 64 and 64 x 96 pixels, the same ones for the same seed."""
    drawn = np.random.default_rng(seed)
    for split, count in (("train", train), ("val", val)):
        for kind in ("images", "masks"):
            (root / split / kind).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            size = (96, 64) if number % 2 else (64, 96)
            noise = drawn.integers(0, 90, (size[1], size[0], 3), dtype=np.uint8)
            image = Image.fromarray(noise)
            mask = Image.new("L", size)
            for label in (1, 2):
                side = int(drawn.integers(16, 40))
                left = int(drawn.integers(0, size[0] - side))
                top = int(drawn.integers(0, size[1] - side))
                box = (left, top, left + side, top + side)
                colour = (220, 120, 60) if label == 1 else (60, 140, 220)
                for target, fill in ((image, colour), (mask, label)):
                    shapes = ImageDraw.Draw(target)
                    shape = shapes.ellipse if label == 1 else shapes.rectangle
                    shape(box, fill=fill)
            image.save(root / split / "images" / f"{number:04d}.jpg", quality=90)
            mask.save(root / split / "masks" / f"{number:04d}.png")
    (root / "classes.txt").write_text("\n".join(CLASSES) + "\n", encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
    print(f"drawn   {sys.argv[1]}: 64 images to train, 21 to validate")
    print(f"next    distdl experiment=segment data.root={sys.argv[1]}")
