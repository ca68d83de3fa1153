"""Part 4: the mean IoU, exact at any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distdl.domains.metric import Metric, Reduce
from masks.views import IGNORED


class MeanIou(Metric[Mapping[str, torch.Tensor], torch.Tensor]):
    """`miou`: the mean over the classes that occur of intersection / union, which are sums over all
    pixels of all images (Everingham et al. 2015, "The PASCAL Visual Object Classes Challenge: A
    Retrospective", section 3.3); `pixel_acc`: the share of right pixels; and `samples`.

    It is no mean over images or ranks: the ranks' confusion matrices are added up, in integers.
    """

    def start(self, device: torch.device) -> None:
        self.device = device
        self.confusion: torch.Tensor | None = None  # [K, K]; row: true, column: said
        self.samples = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, batch: Mapping[str, torch.Tensor], outputs: torch.Tensor) -> None:
        """`outputs`: logits [B, K, S, S]."""
        count = outputs.shape[1]
        if self.confusion is None:
            self.confusion = torch.zeros(count * count, dtype=torch.int64, device=self.device)
        truth = batch["mask"]
        said = outputs.argmax(dim=1)
        weight = batch.get("weight")
        counts = torch.ones(len(truth), dtype=torch.bool, device=truth.device)
        if weight is not None:
            counts = weight > 0
        valid = (truth != IGNORED) & counts[:, None, None]
        pairs = (truth * count + said)[valid]
        self.confusion += torch.bincount(pairs, minlength=count * count)
        self.samples += counts.sum()

    def result(self, reduce: Reduce) -> dict[str, float]:
        assert self.confusion is not None, "a validation without a batch"
        total = reduce(self.confusion)
        samples = float(reduce(self.samples))
        side = round(len(total) ** 0.5)
        matrix = total.view(side, side).double()
        right = matrix.diagonal()
        union = matrix.sum(dim=0) + matrix.sum(dim=1) - right
        iou = (right / union)[union > 0]
        miou = float(iou.mean())
        accuracy = float(right.sum() / matrix.sum())
        return {"miou": miou, "pixel_acc": accuracy, "samples": samples}
