"""Who decides, in a training, when to save and when to end: a callback that the loops ask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from os import PathLike

from lightning.pytorch import Trainer

from distdl.data.held_generators import HeldGenerators


class Decides(ABC):
    """A callback that the loops of `distdl.loops` ask at each moment at which they can save or end.

    A method ends the training by raising `distdl.ranks.stopping.Stopped`.

    Attributes:
        held: The random generators whose states belong into a checkpoint, besides the global ones;
            None before the training has started.
    """

    held: HeldGenerators | None = None

    @abstractmethod
    def batch_ended(self, trainer: Trainer, *, before_validation: bool) -> None:
        """After an optimizer step. `before_validation`: inside an epoch a validation follows, which
        a save from here has to repeat. Collective."""

    @abstractmethod
    def validated(self, trainer: Trainer, *, between_steps: bool) -> None:
        """After a validation inside an epoch. `between_steps`: gradients wait for the next batch,
        so that a checkpoint from here is one to look at, and none to resume from."""

    @abstractmethod
    def epoch_ended(self, trainer: Trainer) -> None:
        """After the last batch of an epoch, and all hooks at its end."""

    @abstractmethod
    def cuts_validation(self, trainer: Trainer) -> bool:
        """Whether a validation ends after this batch. Collective while all ranks have batches."""

    @abstractmethod
    def validation_was_cut(self, trainer: Trainer, changed_weight: str) -> None:
        """Called with the state of before the validation; "" if no weight has changed. Raises."""

    @abstractmethod
    def refuse_path(self, path: str | PathLike[str]) -> None:
        """Raises a UserError if a callback or module may not save a checkpoint there."""


def who_decides(trainer: Trainer) -> Decides | None:
    """The first of the Trainer's callbacks that does; None: nobody, as in a benchmark."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((each for each in callbacks if isinstance(each, Decides)), None)
