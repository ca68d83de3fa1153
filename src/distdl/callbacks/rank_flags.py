"""What the ranks agree on wherever a training may save or end.

Any rank may be asked to stop, rank 0's clock says when a save is due, and a save may have failed.
All ranks see a flag that one of them has raised at the same step. With the flags goes what rank 0's
clock says of `trainer.max_time`.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning.pytorch import Trainer

from distdl.callbacks.metrics import steps_of
from distdl.checkpoint.saving import Saver
from distdl.distributed.agreement import Agreement, least_of_all
from distdl.loops.averaged import Averages
from distdl.loops.fit import fit_loop_of
from distdl.optim.averages import exchanges
from distdl.optim.budget import Reading, TimeBudget
from distdl.ranks.stopping import StopRequest


class Flags(NamedTuple):
    """
    Args:
        stop: It was asked to end.
        save: A save is due.
        failed: A save has failed.
    """

    stop: bool
    save: bool
    failed: bool


SAVE = Flags._fields.index("save")


class RankFlags:
    """This rank's flags, and those on which the ranks have agreed.

    Args:
        stop: Whether this process was asked to end.
        saver: Whose saves may fail.
        budget: The time that the training has; None: no limit.
    """

    def __init__(self, stop: StopRequest, saver: Saver, budget: TimeBudget | None) -> None:
        self.stop = stop
        self.saver = saver
        self.budget = budget
        self._no_reading = () if budget is None else Reading().numbers
        self._common_batches = 0.0  # of the validation, in which the ranks still exchange flags

    def connect(self) -> None:
        """Called when all ranks have joined, before the first exchange."""
        self._agreement = Agreement(len(Flags._fields) + len(self._no_reading))

    def exchange(self, trainer: Trainer, *, save: bool = False) -> Flags:
        """Shows this rank's flags, and returns those that ranks had raised at the exchange before.
        Collective.

        Args:
            save: Whether this rank finds that a save is due.
        """
        return self._exchange(trainer, self._own(save))

    def repeat(self, trainer: Trainer, flags: Flags) -> None:
        """Raises flags once more that ranks have agreed on, for the next exchange. Collective."""
        self._exchange(trainer, flags)

    def stop_now(self, trainer: Trainer) -> bool:
        """Whether any rank was asked to end. Raises a SaveError if a save has failed. Collective,
        and slow."""
        flags = self._exchange(trainer, self._own(), now=True)
        if flags.failed:
            self.saver.settle()
        return flags.stop

    def withdraw_save(self) -> None:
        """Drops the requests for a save that are under way: it has just been fulfilled."""
        self._agreement.withdraw(SAVE)

    # --------------------------------------------------------------------- in a validation

    def begin_validation(self, trainer: Trainer) -> None:
        """Counts the batches that all ranks have: they exchange flags in no others. Collective."""
        loop = fit_loop_of(trainer).epoch_loop
        self._common_batches = least_of_all(sum(loop.val_loop.max_batches))
        if loop.accumulates or rounds(trainer):
            self._common_batches = 0  # it cannot be cut short

    def stop_validation(self, trainer: Trainer) -> bool:
        """Whether a validation ends after this batch. Raises a SaveError if a save has failed.
        Collective while all ranks have batches."""
        if not self._common_batches:
            return False
        self._common_batches -= 1
        flags = self.exchange(trainer)
        if flags.failed:
            self.saver.settle()
        return flags.stop

    # ---------------------------------------------------------------------------------------

    def _own(self, save: bool = False) -> Flags:
        return Flags(bool(self.stop), save, bool(self.saver.error))

    def _exchange(self, trainer: Trainer, flags: Flags, *, now: bool = False) -> Flags:
        exchange = self._agreement.now if now else self._agreement.exchange
        if self.budget is None or not self.budget.has_begun:
            stop, save, failed, *_ = exchange(*flags, *self._no_reading)
            return Flags(bool(stop), bool(save), bool(failed))
        reading = self.budget.look(steps_of(trainer))
        numbers = reading.numbers if trainer.global_rank == 0 else self._no_reading
        stop, save, failed, *seen = exchange(*flags, *numbers)
        self.budget.agreed(Reading.of(seen))
        return Flags(bool(stop), bool(save), bool(failed))


def rounds(trainer: Trainer) -> bool:
    """Whether the module exchanges weights for a validation by its optimizer's arithmetic: what is
    put back is rounded, so a validation may not be run twice."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    kept = any(isinstance(each, Averages) for each in callbacks)
    return not kept and any(map(exchanges, trainer.optimizers))
