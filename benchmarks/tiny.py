"""The tiny model of the overhead and tracking benchmarks, in the shape of each competitor."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 32


class Tiny(LightningModule):
    """An MLP that times its own steps, between its own training steps.

    Args:
        self_log: Log the loss by `self.log`, as Lightning's users do.
        width: Of the hidden layers.
        depth: How many there are.
        warm_up: Steps before the clock starts.
    """

    # Of the newest run: the mean of its timed steps.
    seconds_per_step = 0.0

    def __init__(
        self, self_log: bool = False, width: int = FEATURES, depth: int = 1, warm_up: int = 200
    ) -> None:
        super().__init__()
        sizes = [FEATURES, *[width] * depth]
        hidden = [part for s in pairwise(sizes) for part in (nn.Linear(*s), nn.ReLU())]
        self.network = nn.Sequential(*hidden, nn.Linear(width, 2))
        self.self_log, self.warm_up, self.steps, self.started = self_log, warm_up, 0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        if self.steps == self.warm_up:
            self.started = time.perf_counter()
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        if self.self_log:
            self.log("train/loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        timed = max(1, self.steps - self.warm_up)
        Tiny.seconds_per_step = (time.perf_counter() - self.started) / timed

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class TinyData(LightningDataModule):
    """Batches of rows of 32 numbers, in memory."""

    def __init__(self, batch_size: int = 16, steps: int = 2000) -> None:
        super().__init__()
        self.batch_size, self.steps = batch_size, steps

    def train_dataloader(self) -> DataLoader[Any]:
        rows = self.batch_size * self.steps
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(rows, FEATURES, generator=generator)
        labels = torch.randint(0, 2, (rows,), generator=generator)
        return DataLoader(TensorDataset(data, labels), self.batch_size, shuffle=True)
