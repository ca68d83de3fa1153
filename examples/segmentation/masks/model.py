"""A network that gives each pixel a class."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distdl.models.evaluated import Evaluated
from masks.domain import Segmentation
from masks.views import IGNORED


class Segmenter(Evaluated):
    """Args:
    network: Images [B, 3, S, S] to logits [B, K, S, S], or to a dict with them as "out", as
        torchvision's networks for segmentation have it.
    """

    domain = Segmentation()

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.network(images)
        return outputs["out"] if isinstance(outputs, Mapping) else outputs

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["image"]).float()
        return F.cross_entropy(logits, batch["mask"], ignore_index=IGNORED)

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        self.evaluated(batch, self(batch["image"]))

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        return torch.as_tensor(self(batch["image"]))
