"""How an image becomes a square: decided from its size, applied where its pixels are."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F


class Crop(NamedTuple):
    """Cut out, resize, keep the centre, flip: all in pixels.

    Args:
        top, left, height, width: What is cut out of the image.
        to_height, to_width: What that is resized to.
        size: Side of the centre that is kept of that.
        flip: Left becomes right.
    """

    top: int
    left: int
    height: int
    width: int
    to_height: int
    to_width: int
    size: int
    flip: bool = False

    def apply(self, image: torch.Tensor) -> torch.Tensor:
        """uint8 [3, H, W] to uint8 [3, S, S], on the device of `image`: bilinear with antialias."""
        cut = image[:, self.top : self.top + self.height, self.left : self.left + self.width]
        # The CPU's kernel for uint8 wants whole pixels in a row; planes take it four times as long.
        batch = cut[None].contiguous(memory_format=torch.channels_last)
        to = (self.to_height, self.to_width)
        if batch.device.type == "cpu":
            square = F.interpolate(batch, to, mode="bilinear", antialias=True)[0]
        else:  # GPUs have no such kernel for whole numbers
            floats = F.interpolate(batch.float(), to, mode="bilinear", antialias=True)[0]
            square = floats.round_().clamp_(0, 255).to(torch.uint8)
        if to != (self.size, self.size):
            top, left = (round((side - self.size) / 2.0) for side in to)
            square = square[:, top : top + self.size, left : left + self.size]
        return square.flip(-1) if self.flip else square


def random_crop(
    height: int, width: int, scale: Sequence[float], ratio: Sequence[float]
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a crop, drawn as torchvision's RandomResizedCrop draws it.

    With Python's `random`: torch's one-element tensors would take 40 us more for each image.
    """
    for _ in range(10):
        area = height * width * random.uniform(*scale)
        aspect = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    # Nothing fits: the largest centre whose ratio is allowed.
    w, h = width, height
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w
