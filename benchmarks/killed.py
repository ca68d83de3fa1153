"""The training of the goodput benchmark, by distdl and by `torchrun benchmarks/killed.py`.

Each rank notes the time and the samples of each step in a file of its own.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 32
SAVE_EVERY = 20  # steps


class Net(LightningModule):
    """An MLP with group norm.

    Args:
        folder: For `<rank>-<pid>.txt` with a line per step: time, step, ranks, samples.
        wait: Seconds of each step in which the rank waits, as if for a device.
    """

    def __init__(self, folder: str, wait: float) -> None:
        super().__init__()
        hidden = nn.Linear(FEATURES, FEATURES), nn.GroupNorm(4, FEATURES), nn.ReLU()
        self.network = nn.Sequential(*hidden, nn.Linear(FEATURES, 2))
        self.folder = Path(folder)
        self.wait = wait
        self.file: IO[str] | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.wait)
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.file is None:
            path = self.folder / f"{self.global_rank}-{os.getpid()}.txt"
            self.file = path.open("a", buffering=1)
        ids = " ".join(map(str, batch[2].tolist()))
        self.file.write(f"{time.time()} {self.global_step} {self.trainer.world_size} {ids}\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Rows(LightningDataModule):
    """Rows of numbers with their positions, in random order."""

    def __init__(self, rows: int, batch_size: int) -> None:
        super().__init__()
        self.rows = rows
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        inputs = torch.randn(self.rows, FEATURES, generator=torch.Generator().manual_seed(0))
        labels = (inputs.sum(1) > 0).long()
        data = TensorDataset(inputs, labels, torch.arange(self.rows))
        return DataLoader(data, self.batch_size, shuffle=True)


def main(folder: str, wait: str, rows: str, batch_size: str) -> None:
    """A rank of torchrun, with what Lightning offers: the newest checkpoint, `ckpt_path="last"`."""
    seed_everything(0, verbose=False)
    saving: dict[str, Any] = {"every_n_train_steps": SAVE_EVERY, "save_last": True}
    callback = ModelCheckpoint(Path(folder, "checkpoints"), **saving)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Rows(int(rows), int(batch_size))
    trainer.fit(Net(folder, float(wait)), datamodule=data, ckpt_path="last")


if __name__ == "__main__":
    main(*sys.argv[1:])
