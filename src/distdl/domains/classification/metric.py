"""Loss and accuracy of a classifier, of sums over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch.nn import functional as F

from distdl.domains.metric import Metric, Reduce

# Fields by name, "image" and "label" among them, or a pair of images and labels.
Labelled: TypeAlias = Mapping[str, torch.Tensor] | Sequence[torch.Tensor]


class Accuracy(Metric[Labelled, torch.Tensor]):
    """`loss` (cross-entropy without label smoothing), `acc1` and `acc5` (0 to 1), and `samples`.

    Sums over all samples are all-reduced once at the end, and then divided, so the values are the
    same at any world size.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(4)

    def start(self, device: torch.device) -> None:
        # float64 for exact sums and counts; Apple's GPUs do not support it.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(4, dtype=dtype, device=device)

    def add(self, batch: Labelled, outputs: torch.Tensor) -> None:
        """`batch`: with "label" int64 [B] and perhaps "weight", or a pair (image, label).
        `outputs`: logits float32 [B, num_classes]."""
        labels, weight = labels_of(batch)
        loss = F.cross_entropy(outputs, labels, reduction="none")
        best = outputs.topk(min(5, outputs.shape[1])).indices
        hits = best == labels[:, None]
        rows = torch.stack((loss, hits[:, 0], hits.any(dim=1), torch.ones_like(loss)))
        # `where` and not a product, since an infinite loss times a weight of 0 is NaN.
        counted = torch.where(weight > 0, rows * weight, 0.0)
        self.sums += counted.to(self.sums.dtype).sum(dim=1)

    def result(self, reduce: Reduce) -> dict[str, float]:
        loss, top1, top5, samples = reduce(self.sums).tolist()
        count = samples or math.nan
        means = {"loss": loss / count, "acc1": top1 / count, "acc5": top5 / count}
        return {**means, "samples": samples}


def labels_of(batch: Labelled) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels int64 [B], and weights float32 [B] (ones if the batch has none), both where the labels
    are: in a pipeline, images are on `meta` in all stages but the first."""
    if not isinstance(batch, Mapping):
        return batch[1], torch.ones(len(batch[1]), device=batch[1].device)
    labels, weight = batch["label"], batch.get("weight")
    if weight is None:
        weight = torch.ones(len(labels), device=labels.device)
    return labels, weight.float()
