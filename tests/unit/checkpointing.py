"""Trainings with distdl's Checkpointer, for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distdl.callbacks import Checkpointer
from distdl.checkpoint.formats import AnyCheckpoint
from distdl.data.sampling import TrainPosition
from distdl.ranks.stopping import StopRequest
from distdl.runs.checkpoints import CheckpointStore


class OneWeight(LightningModule):
    """Its weight becomes lower by 0.1 with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def checkpointer(folder: Path, **more: Any) -> Checkpointer:
    """One that keeps everything, in `folder`."""
    settings = {"global_batch_size": 1, "keep_last": 100, **more}
    return Checkpointer(CheckpointStore(folder), StopRequest(), TrainPosition(), **settings)


def numbers(count: int) -> Any:
    return DataLoader(torch.zeros(count))  # type: ignore[arg-type]


def fit(
    module: LightningModule,
    callbacks: Sequence[Callback],
    *data: Any,
    resume: Path | None = None,
    trust: bool = False,
    **arguments: Any,
) -> Trainer:
    """Trains on one CPU without output; `trust`: the checkpoint may run code while it is read."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"plugins": [AnyCheckpoint()], **dict.fromkeys(off, False), **arguments}
    trainer = Trainer(accelerator="cpu", callbacks=list(callbacks), **options)
    trainer.fit(module, *data, ckpt_path=resume, weights_only=not trust if resume else None)
    return trainer
