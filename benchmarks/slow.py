"""A small network and its data, with one part of a step slowed down on one rank."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

FEATURES, WIDTH, DEPTH, BATCH = 32, 512, 4, 64


class Slow(LightningModule):
    """An MLP.

    Args:
        part: "copy", "forward", "backward", "optimizer" or "checkpoint"; "": none is slow.
        rank: The slow one.
        seconds: By how much this part is longer.
        batch_norm: Whether DDP sends buffers at the begin of each forward.
    """

    def __init__(
        self, part: str = "", rank: int = 1, seconds: float = 0.05, batch_norm: bool = False
    ) -> None:
        super().__init__()
        norm = nn.BatchNorm1d if batch_norm else nn.LayerNorm
        layers: list[nn.Module] = []
        for before, after in pairwise([FEATURES, *[WIDTH] * DEPTH]):
            layers += [nn.Linear(before, after), norm(after), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(WIDTH, 2))
        self.slow = part if is_rank(rank) else ""
        self.seconds = seconds
        middle = self.network[len(self.network) // 2]
        middle.register_forward_pre_hook(lambda *_: self.delay("forward"))
        middle.register_full_backward_hook(lambda *_: self.delay("backward"))

    def delay(self, part: str) -> None:
        if part == self.slow:
            time.sleep(self.seconds)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.delay("copy")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: self.delay("optimizer"))
        return optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.delay("checkpoint")


class SlowData(LightningDataModule):
    """Batches of rows of 32 numbers.

    Args:
        steps: Batches of each of two ranks.
        late: Whether each batch comes late on `rank`, by `seconds`.
    """

    def __init__(self, steps: int, late: bool, rank: int, seconds: float) -> None:
        super().__init__()
        self.batch_size = BATCH
        self.steps = steps
        self.seconds = seconds if late and is_rank(rank) else 0.0

    def train_dataloader(self) -> DataLoader[Any]:
        rows = 2 * BATCH * self.steps
        data = TensorDataset(torch.randn(rows, FEATURES), torch.randint(0, 2, (rows,)))
        return DataLoader(data, BATCH, collate_fn=self.collate)

    def collate(self, rows: list[Any]) -> Any:
        time.sleep(self.seconds)
        return default_collate(rows)


def is_rank(rank: int) -> bool:
    return os.environ.get("RANK") == str(rank)
