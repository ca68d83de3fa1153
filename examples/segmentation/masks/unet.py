"""A small U-Net (Ronneberger et al. 2015), with GroupNorm, so that it learns from small batches."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UNet(nn.Module):
    """Images [B, 3, S, S] to logits [B, num_classes, S, S]; S is a multiple of 2**depth.

    Args:
        width: Channels at full size; each halving of the size doubles them.
        depth: How often the size is halved.
    """

    def __init__(self, num_classes: int, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList([convolutions(3, width)])
        self.up = nn.ModuleList()
        for narrow, wide in pairwise(widths):
            self.down.append(convolutions(narrow, wide))
            self.up.append(convolutions(wide + narrow, narrow))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        seen = self.down[0](images)
        before = []
        for layer in self.down[1:]:
            before.append(seen)
            seen = layer(F.max_pool2d(seen, 2))
        for layer in reversed(self.up):
            beside = before.pop()
            larger = F.interpolate(seen, scale_factor=2.0, mode="nearest")
            seen = layer(torch.cat([larger, beside], dim=1))
        return self.head(seen)


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
        layers.append(nn.GroupNorm(8, outputs))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)
