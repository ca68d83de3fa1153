"""Square crops: chosen from the size of an image, applied on the device of its pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from distdl.datasets.image_headers import MOST_PIXELS, TooLarge
from distdl.images.draws import GLOBAL, Draws


class Crop(NamedTuple):
    """Cuts out a box, resizes it, keeps its centre, and flips it. All sizes are in pixels.

    Args:
        top, left, height, width: The box.
        to_height, to_width: Its size after resizing.
        size: Side of the centre square that is kept.
        flip: Mirror horizontally.
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
        # The CPU's uint8 kernel is four times as fast on channels_last as on planes.
        batch = cut[None].contiguous(memory_format=torch.channels_last)
        to = (self.to_height, self.to_width)
        if batch.device.type == "cpu":
            square = F.interpolate(batch, to, mode="bilinear", antialias=True)[0]
        else:  # GPUs have no such kernel for integers
            floats = F.interpolate(batch.float(), to, mode="bilinear", antialias=True)[0]
            square = floats.round_().clamp_(0, 255).to(torch.uint8)
        if to != (self.size, self.size):
            top, left = self.kept
            square = square[:, top : top + self.size, left : left + self.size]
        return square.flip(-1) if self.flip else square

    @property
    def kept(self) -> tuple[int, int]:
        """Top and left of the square that is kept, in the resized box."""
        return round((self.to_height - self.size) / 2.0), round((self.to_width - self.size) / 2.0)


def central_crop(height: int, width: int, short_side: int, size: int) -> Crop:
    """Resizes the short side, and keeps the centre, as validation does.

    Raises:
        TooLarge: The image is so long and narrow that its long side would fill the memory.
    """
    short = min(height, width)
    # Rounded down, as torchvision does.
    to_height, to_width = (int(short_side * side / short) for side in (height, width))
    if to_height * to_width > max(MOST_PIXELS, 4 * short_side**2):
        raise TooLarge(f"is {width} x {height} pixels: too long and narrow to resize")
    return Crop(0, 0, height, width, to_height, to_width, size)


def random_crop(
    height: int,
    width: int,
    scale: Sequence[float],
    ratio: Sequence[float],
    draws: Draws = GLOBAL,
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a crop, drawn like torchvision's RandomResizedCrop, without
    torch's one-element tensors, which take 40 us more per image."""
    for _ in range(10):
        area = height * width * draws.uniform(scale[0], scale[1])
        aspect = math.exp(draws.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w = round(math.sqrt(area * aspect))
        h = round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return draws.randint(0, height - h), draws.randint(0, width - w), h, w
    # Nothing fits: take the largest central box with an allowed ratio.
    h = round(width / ratio[0]) if width / height < ratio[0] else height
    w = round(height * ratio[1]) if width / height > ratio[1] else width
    return (height - h) // 2, (width - w) // 2, h, w
