"""Where the averages of the weights are evaluated and saved: a callback exchanges them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from lightning.pytorch import Trainer


class Averages(ABC):
    """A callback that knows the averages of the weights, which the loops ask for."""

    @abstractmethod
    def averaged(self, trainer: Trainer, *, settled: bool) -> AbstractContextManager[None]:
        """Inside, the averages are in the place of the weights, unless they are already; after it,
        the weights are there again, bit for bit.

        Args:
            settled: All that depends on the weights must fit the averages, which takes batches and
                is collective. False: it need not, and what is saved says so.
        """


def averaged(trainer: Trainer, *, settled: bool) -> AbstractContextManager[None]:
    """As `Averages.averaged` of the Trainer's callback; nothing changes if it has none."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    known = next((each for each in callbacks if isinstance(each, Averages)), None)
    return known.averaged(trainer, settled=settled) if known else nullcontext()
