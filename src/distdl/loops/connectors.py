"""Lightning's connectors, as subclasses: what a checkpoint restores, loaders and signals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import RunningStage

from distdl.loops.fit import fit_loop_of


class Restores(Protocol):
    """How a checkpoint becomes the state of a run."""

    def weights(self, checkpoint: dict[str, Any], strict: bool) -> None:
        """Loads the weights into the module."""

    def training(self, checkpoint: dict[str, Any]) -> None:
        """Restores the rest: the loops, and in a training the optimizers and schedules."""


class CheckpointConnector(_CheckpointConnector):
    """Restores checkpoints as `restores` does; without it, as Lightning does."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.restores: Restores | None = None

    def restore_model(self) -> None:
        if self.restores is None or not self._loaded_checkpoint:
            return super().restore_model()
        module = self.trainer.lightning_module
        checkpoint = self._loaded_checkpoint
        call._call_lightning_module_hook(self.trainer, "on_load_checkpoint", checkpoint)
        self.restores.weights(checkpoint, module.strict_loading)

    def restore_training_state(self) -> None:
        if self.restores is None or not self._loaded_checkpoint:
            return self.restore_everything()
        self.restores.training(self._loaded_checkpoint)

    def restore_everything(self) -> None:
        """What Lightning does: precision, loops, loaders, optimizers and schedules."""
        super().restore_training_state()
        fit_loop_of(self.trainer).rebuild_loaders_with_state()


class DataConnector(_DataConnector):
    """Passes on what `predict_dataloader` has returned to whom asks for it."""

    opened: Callable[[Any], None] | None = None

    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if self.opened is None or mode != RunningStage.PREDICTING:
            return super()._prepare_dataloader(dataloader, shuffle, mode)
        # Each rank has its share already; Lightning would replace the batch sampler.
        self.opened(dataloader)
        return dataloader


class SignalConnector(_SignalConnector):
    """Installs no handlers: distdl's are there already, and Lightning's may deadlock
    (https://github.com/Lightning-AI/pytorch-lightning/issues/20806)."""

    def register_signal_handlers(self) -> None:
        pass
