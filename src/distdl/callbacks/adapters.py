"""Checkpoints of a model with `model.lora` hold what is trained."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from distdl.callbacks.lean import LeanCallback
from distdl.checkpoint.adapters import KEY
from distdl.models import lora


class Adapters(LeanCallback):
    """Must come after the callbacks that read a checkpoint's weights as it is saved.

    Args:
        module: With its adapters, before a strategy divides it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.trained = lora.trained_names(module)
        self.beside = lora.digest_of(module, self.trained)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        weights = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {k: value for k, value in weights if k in self.trained}
        checkpoint[KEY] = {"beside": self.beside}


def adapters_of(trainer: Trainer) -> Adapters | None:
    """Those of a Trainer; None: its model has none."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((each for each in callbacks if isinstance(each, Adapters)), None)
