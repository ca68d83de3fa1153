"""How an image becomes a square, decided before it is decoded, carried out where its pixels are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F


class Plan(NamedTuple):
    """Cut out, resize, keep the centre, flip: all in pixels.

    Args:
        top, left, height, width: What is cut out of it.
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


def carried_out(plan: Plan, image: torch.Tensor) -> torch.Tensor:
    """uint8 [3, H, W] to uint8 [3, S, S], on the device of `image`: bilinear with antialias."""
    crop = image[:, plan.top : plan.top + plan.height, plan.left : plan.left + plan.width]
    # The CPU's kernel for uint8 wants whole pixels in a row; planes take it four times as long.
    batch = crop[None].contiguous(memory_format=torch.channels_last)
    to = (plan.to_height, plan.to_width)
    if batch.device.type == "cpu":
        seen = F.interpolate(batch, to, mode="bilinear", antialias=True)[0]
    else:  # GPUs have no such kernel for whole numbers
        floats = F.interpolate(batch.float(), to, mode="bilinear", antialias=True)[0]
        seen = floats.round_().clamp_(0, 255).to(torch.uint8)
    if to != (plan.size, plan.size):
        top, left = (round((side - plan.size) / 2.0) for side in to)
        seen = seen[:, top : top + plan.size, left : left + plan.size]
    return seen.flip(-1) if plan.flip else seen
