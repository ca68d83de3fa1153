"""Mixup and CutMix on the device."""

from __future__ import annotations

import math
import random

import torch
from torch.nn import functional as F


def mix(
    images: torch.Tensor,
    labels: torch.Tensor,
    num_classes: int,
    *,
    mixup: float,
    cutmix: float,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixes a batch with mixup or CutMix, chosen at random if both are switched on.

    Each image is paired with the image a random number of rows further on. As batches are shuffled,
    this is as good as a permutation, and it needs no copy from the host.

    Args:
        images: Floating point [B, C, H, W].
        labels: int64 [B].
        num_classes: Width of the soft targets.
        mixup: Its alpha; 0: off.
        cutmix: Its alpha; 0: off.
        seed: Of all draws: the same batch and seed give the same result.

    Returns:
        Images of the same shape, and targets float32 [B, num_classes] whose rows sum to 1.
    """
    rng = random.Random(seed)
    use_cutmix = rng.random() < 0.5 if mixup and cutmix else bool(cutmix)
    alpha = cutmix if use_cutmix else mixup
    share = rng.betavariate(alpha, alpha)
    places = rng.randrange(1, len(images)) if len(images) > 1 else 0
    partners = _further_on(images, places)
    if use_cutmix:
        centre = rng.random(), rng.random()
        images, share = _cutmix(images, partners, share, centre)
    else:
        images = _mixup(images, partners, share)
    targets = F.one_hot(labels, num_classes).float()
    return images, share * targets + (1 - share) * _further_on(targets, places)


def _mixup(images: torch.Tensor, partners: torch.Tensor, share: float) -> torch.Tensor:
    """Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization" (arXiv 1710.09412)."""
    return torch.lerp(partners, images, share)


def _cutmix(
    images: torch.Tensor, partners: torch.Tensor, share: float, centre: tuple[float, float]
) -> tuple[torch.Tensor, float]:
    """Yun et al. 2019, "CutMix" (arXiv 1905.04899): pastes a box of the partner.

    Args:
        share: Share of the image that should be kept.
        centre: Of the box, relative to height and width.

    Returns:
        The images, and the share that was kept: more than `share` if the edge cuts the box off.
    """
    height, width = images.shape[-2:]
    side = math.sqrt(1 - share) / 2
    y, x = centre
    top, bottom = (min(max(round((y + s) * height), 0), height) for s in (-side, side))
    left, right = (min(max(round((x + s) * width), 0), width) for s in (-side, side))
    images = images.clone()
    images[..., top:bottom, left:right] = partners[..., top:bottom, left:right]
    return images, 1 - (bottom - top) * (right - left) / (height * width)


def _further_on(rows: torch.Tensor, places: int) -> torch.Tensor:
    # Not torch.roll: on CUDA that loses channels_last.
    return torch.cat((rows[places:], rows[:places]))
