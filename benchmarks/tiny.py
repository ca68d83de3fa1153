"""The tiny model of the overhead benchmark, in the shape of each competitor."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WARM_UP = 200  # steps before the clock starts


class Tiny(LightningModule):
    """An MLP of two layers that times its own steps, between its own training steps.

    Args:
        self_log: Log the loss by `self.log`, as Lightning's users do.
    """

    seconds_per_step = 0.0  # of the newest run

    def __init__(self, self_log: bool = False) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        self.self_log, self.steps, self.started = self_log, 0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        if self.steps == WARM_UP:
            self.started = time.perf_counter()
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        if self.self_log:
            self.log("train/loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        Tiny.seconds_per_step = (time.perf_counter() - self.started) / (self.steps - WARM_UP)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class TinyData(LightningDataModule):
    """Batches of 16 rows of 32 numbers, in memory."""

    def __init__(self, batch_size: int = 16, steps: int = 2000) -> None:
        super().__init__()
        self.batch_size, self.steps = batch_size, steps

    def train_dataloader(self) -> DataLoader[Any]:
        rows = self.batch_size * self.steps
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(rows, 32, generator=generator)
        labels = torch.randint(0, 2, (rows,), generator=generator)
        return DataLoader(TensorDataset(data, labels), self.batch_size, shuffle=True)
