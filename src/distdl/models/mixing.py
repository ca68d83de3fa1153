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

    Each image is paired with the image a random number of rows further on, which is the same for
    all. As batches are shuffled, this is as good as a permutation and needs no copy from the host.

    Args:
        images, labels: Floating point [B, C, H, W], and int64 [B].
        num_classes: Width of the soft targets.
        mixup, cutmix: Alpha of each; 0: off.
        seed: Of all draws: the same batch and seed give the same result.

    Returns:
        Images of the same shape, and targets float32 [B, num_classes] whose rows sum to 1.
    """
    rng = random.Random(seed)
    use_cutmix = rng.random() < 0.5 if mixup and cutmix else bool(cutmix)
    alpha = cutmix if use_cutmix else mixup
    share = rng.betavariate(alpha, alpha)
    rows = rng.randrange(1, len(images)) if len(images) > 1 else 0
    partners = _shifted(images, rows)
    if use_cutmix:
        images, share = _cutmix(images, partners, share, (rng.random(), rng.random()))
    else:  # Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization" (arXiv 1710.09412)
        images = torch.lerp(partners, images, share)
    targets = F.one_hot(labels, num_classes).float()
    return images, share * targets + (1 - share) * _shifted(targets, rows)


def _cutmix(
    images: torch.Tensor, partners: torch.Tensor, share: float, centre: tuple[float, float]
) -> tuple[torch.Tensor, float]:
    """Yun et al. 2019, "CutMix" (arXiv 1905.04899): pastes a box of the partner.

    Returns:
        The images, and the share that was kept: more than `share` if the edge cuts the box off.
    """
    height, width = images.shape[-2:]
    half = math.sqrt(1 - share) / 2
    y, x = centre
    top, bottom = (min(max(round((y + s) * height), 0), height) for s in (-half, half))
    left, right = (min(max(round((x + s) * width), 0), width) for s in (-half, half))
    images = images.clone()
    images[..., top:bottom, left:right] = partners[..., top:bottom, left:right]
    return images, 1 - (bottom - top) * (right - left) / (height * width)


def _shifted(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    # Not torch.roll: on CUDA that loses channels_last.
    return torch.cat((tensor[rows:], tensor[:rows]))
