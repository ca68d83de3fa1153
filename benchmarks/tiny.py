"""The tiny model and data of the overhead and tracking benchmarks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import turns

FEATURES = 32


class Tiny(LightningModule):
    """An MLP.

    Args:
        self_log: Log the loss by `self.log`, as Lightning's users do.
        width: Of the hidden layers.
        depth: Number of hidden layers.
        first, steps: Of `turns.stop_before`, for a Trainer that may have no callbacks; `steps` 0:
            the training never stops.
    """

    def __init__(
        self,
        self_log: bool = False,
        width: int = FEATURES,
        depth: int = 1,
        first: int = 0,
        steps: int = 0,
    ) -> None:
        super().__init__()
        sizes = [FEATURES, *[width] * depth]
        hidden = [part for s in pairwise(sizes) for part in (nn.Linear(*s), nn.ReLU())]
        self.network = nn.Sequential(*hidden, nn.Linear(width, 2))
        self.self_log = self_log
        self.first = first
        self.steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.steps:
            turns.stop_before(batch_idx, self.first, self.steps)
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        if self.self_log:
            self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class TinyData(LightningDataModule):
    """Batches of rows of 32 numbers, in memory."""

    def __init__(self, batch_size: int = 16, steps: int = 2000) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.steps = steps

    def train_dataloader(self) -> DataLoader[Any]:
        rows = self.batch_size * self.steps
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(rows, FEATURES, generator=generator)
        labels = torch.randint(0, 2, (rows,), generator=generator)
        return DataLoader(TensorDataset(data, labels), self.batch_size, shuffle=True)
