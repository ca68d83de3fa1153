"""Trainings with distdl's Checkpointer, for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from distdl.callbacks import Checkpointer
from distdl.checkpoint.formats import AnyCheckpoint
from distdl.config.schema import Checkpoint
from distdl.data.sampling import TrainPosition
from distdl.loops.trainer import Trainer
from distdl.ranks.stopping import StopRequest
from distdl.runs.checkpoints import CheckpointStore


class OneWeight(LightningModule):
    """Its weight, of any size, becomes lower by 0.1 with each step."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def training_step(self, batch, batch_idx):
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def checkpointer(folder: Path, **more: Any) -> Checkpointer:
    """One that keeps everything, in `folder`."""
    settings = {"keep_last": 100, **{k: more.pop(k) for k in Checkpoint.model_fields.keys() & more}}
    parts = CheckpointStore(folder), StopRequest(), TrainPosition()
    given = {"global_batch_size": 1, **more}
    return Checkpointer(*parts, settings=Checkpoint(**settings), **given)


def numbers(count: int) -> Any:
    return DataLoader(torch.zeros(count))  # type: ignore[arg-type]


def fit(
    module, callbacks: Sequence[Callback], *data: Any, resume=None, trust=False, **arguments: Any
) -> Trainer:
    """Trains on one CPU without output; `trust`: the checkpoint may run code while it is read."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"plugins": [AnyCheckpoint()], **dict.fromkeys(off, False), **arguments}
    trainer = Trainer(accelerator="cpu", callbacks=list(callbacks), **options)
    trainer.fit(module, *data, ckpt_path=resume, weights_only=not trust if resume else None)
    return trainer
