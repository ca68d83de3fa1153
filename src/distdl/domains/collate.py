"""Part 3 of a domain, for images of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import default_collate

from distdl.images.nvjpeg import EncodedBatch


def stacked(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch of samples. Its "image" is uint8 [B, 3, S, S] or an `EncodedBatch`; other fields are
    those of torch's default_collate. Pixels stay channels_last as in the samples; default_collate
    alone would copy them to planes."""
    rest = [{k: v for k, v in s.items() if k not in ("image", "crop")} for s in samples]
    batch: dict[str, Any] = default_collate(rest)
    if "crop" in samples[0]:
        return {**batch, "image": EncodedBatch(samples)}
    image = default_collate([sample["image"].permute(1, 2, 0) for sample in samples])
    return {**batch, "image": image.permute(0, 3, 1, 2)}
