"""Part 2: an image and its mask, cropped and flipped alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from distdl.datasets.image_files import load_image
from distdl.datasets.image_headers import DamagedImage
from distdl.images.decoding import decode_pil

IGNORED = 255


class MaskView:
    """Image and mask as {"image": uint8 [3, S, S], "mask": int64 [S, S]}.

    Training takes a random crop and a flip, evaluation the whole image at that size. torchvision's
    transforms draw from torch's generator, which distdl seeds for each sample.

    Args:
        size: S, in pixels.
    """

    def __init__(self, size: int, training: bool) -> None:
        steps: list[v2.Transform]
        if training:
            steps = [v2.RandomResizedCrop(size, (0.5, 1.0), antialias=True)]
            steps.append(v2.RandomHorizontalFlip())
        else:
            steps = [v2.Resize((size, size), InterpolationMode.BILINEAR, antialias=True)]
        self.transform = v2.Compose(steps)

    def __call__(self, data: bytes, mask: object) -> dict[str, Any]:
        """Raises DamagedImage if one of the two cannot be decoded, or their sizes differ."""
        image = decode_pil(data)
        classes = mask_of(mask) if isinstance(mask, bytes) else None
        if classes is None:  # an image without a mask, to be predicted
            classes = torch.full(image.shape[-2:], IGNORED, dtype=torch.uint8)
        if classes.shape != image.shape[-2:]:
            sizes = f"{[*classes.shape]} pixels, and the image {[*image.shape[-2:]]}"
            raise DamagedImage(f"its mask has {sizes}")
        seen, truth = self.transform(tv_tensors.Image(image), tv_tensors.Mask(classes))
        pixels = seen.as_subclass(torch.Tensor)
        return {"image": pixels, "mask": truth.as_subclass(torch.Tensor).long()}


def mask_of(data: bytes) -> torch.Tensor:
    """The class of each pixel, uint8 [H, W], of a PNG with a palette or in grey."""
    image = load_image(data)
    if image.mode not in ("P", "L"):
        raise DamagedImage(f"its mask is in the mode {image.mode}, not a palette (P) or grey (L)")
    return torch.from_numpy(np.array(image))
