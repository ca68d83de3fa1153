"""A training: its epochs, their steps, where a save may happen, and what a signal does.

Lightning's loops (2.6) with what an exact resume needs besides. It rests on this:

1. A checkpoint is the state at one moment, at which nothing is half done:
   - after an optimizer step that is not the last of its epoch (`EpochLoop.on_advance_end`), after
     the step's hooks and loggers, and never between batches whose gradients are accumulated. If a
     validation follows, before it, since it may take long: a resume begins with that validation.
     What a validation between such batches finds best is best.ckpt alone, which no resume of the
     run begins with. What ends the training there (a Timer) saves those gradients as well, or
     waits for their step where a strategy cannot save them (`waits_for_step`);
   - inside a validation that a signal cuts short (`loops/validation.py`), as it was before it;
   - at the end of an epoch (`FitLoop.on_advance_end`), after all hooks and plateau schedules.
2. A signal is obeyed at these moments alone, by all ranks at the same one: they have agreed on it
   (`Decides`). In a validation that is after a batch, if the state of before it can be put back.
3. An epoch that was cut goes on with its next batch. Its loaders, generators, sums of metrics and
   callbacks are as they were; what sets up an epoch does not run again.
4. An epoch that has ended is not begun again, whatever limit (`max_steps`, `max_time`) ended it.
5. A strategy that lays out, once, what is trained cannot train more later. Its fit is left at the
   end of an epoch (`FitLoop.leave`), and goes on as a resume does, in the same processes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.loops import _FitLoop, _TrainingEpochLoop
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.utilities.exceptions import _TunerExitException

from distdl.loops.decides import Decides, who_decides
from distdl.loops.generators import rng_state
from distdl.loops.validation import ValidationLoop


class Rebuilt(Exception):
    """A fit was left, to go on from the newest checkpoint with everything built again."""


class EpochLoop(_TrainingEpochLoop):
    """The batches of one epoch.

    Args:
        trainer: Whose `fit_loop.epoch_loop` this becomes.
        min_steps, max_steps: As the Trainer's.
    """

    val_loop: ValidationLoop

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self.val_loop = ValidationLoop(trainer)
        self.decides: Decides | None = None
        # The generators as they were before a validation that a resumed run does not repeat.
        self.generators: dict[str, Any] | None = None
        # What was decided at the end of this batch, for Lightning, which asks again.
        self._validates: bool | None = None

    @property
    def accumulates(self) -> bool:
        """Whether the batch leaves its gradients for the next one to add to."""
        return self._should_accumulate()

    @property
    def is_over(self) -> bool:
        """Whether the batch is the last one of its epoch."""
        return self._num_ready_batches_reached()

    @property
    def waits_for_step(self) -> bool:
        """Whether the training, told to end between accumulated batches, takes their step first:
        under a strategy whose waiting gradients no checkpoint holds."""
        if not self.trainer.should_stop or not self.accumulates or self.is_over:
            return False
        return not getattr(self.trainer.strategy, "ends_between_steps", True)

    @property
    def done(self) -> bool:
        """Whether the epoch is left: after its last batch, or since something ends the training."""
        return super().done and not self.waits_for_step

    @property
    def logged_names(self) -> set[str]:
        """The names of what the module has logged in this epoch."""
        return {result.meta.name for result in self._results.values()}

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """After each batch: saves as late as possible, then validates if it is due, or the other
        way round: see this module's docstring."""
        if self._skip_next_val:  # resumed from a save at this point: nothing is left to do
            self._skip_next_val = False
            return
        stepped, inside = not self.accumulates, not self.is_over
        validates = self._should_check_val_fx(data_fetcher)
        if validates and self.trainer.should_stop:
            self.generators = None if self._is_due(data_fetcher) else self.rng_state()
        if validates and stepped and self.decides:
            self.decides.batch_ended(self.trainer, before_validation=inside)
        self._validates = validates
        try:
            super().on_advance_end(data_fetcher)
        finally:
            self._validates = None
        if validates and inside and self.decides:
            self.decides.validated(self.trainer, between_steps=not stepped)
        elif not validates and stepped and self.decides:
            self.decides.batch_ended(self.trainer, before_validation=False)

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        """Whether a validation follows the batch. One at the end of a training waits with it."""
        if self._validates is not None:
            return self._validates
        if self.waits_for_step:
            return self._is_due(data_fetcher)
        return super()._should_check_val_fx(data_fetcher)

    def rng_state(self) -> dict[str, Any]:
        """The state of this rank's generators, for a checkpoint."""
        return rng_state(self.decides.held if self.decides else None)

    def _is_due(self, data_fetcher: _DataFetcher) -> bool:
        """Whether a validation follows even if the training does not stop here. A resumed run
        repeats only such a one."""
        self.trainer.should_stop = False
        try:
            return self._should_check_val_fx(data_fetcher)
        finally:
            self.trainer.should_stop = True

    def _on_before_fetch(self) -> None:
        super()._on_before_fetch()
        fit_loop_of(self.trainer).keep_loader_states()

    def _broadcast_sigterm_tensor(self) -> None:
        """Does nothing. Lightning would broadcast a flag at every step and wait for the device to
        read it; `Decides` agrees on one without waiting."""


class FitLoop(_FitLoop):
    """The epochs of a training.

    Args:
        trainer: Whose `fit_loop` this becomes; it has Lightning's, which gives the limits.
    """

    epoch_loop: EpochLoop

    def __init__(self, trainer: Trainer) -> None:
        limits = trainer.fit_loop
        super().__init__(trainer, min_epochs=limits.min_epochs, max_epochs=limits.max_epochs)
        self.epoch_loop = EpochLoop(trainer, limits.min_steps, limits.max_steps)
        # Called after the last batch of an epoch, before the hooks at its end.
        self.after_batches: Callable[[], None] | None = None
        self._states_before: list[Any] = []  # of the loaders, before the last batch was fetched
        self.was_left = False

    def on_run_start(self) -> None:
        self.epoch_loop.decides = who_decides(self.trainer)
        if self.epoch_loop.val_loop.restarted_mid_evaluation:
            # With an interval of time between validations, this one would not be due.
            self.trainer._last_val_time = -math.inf  # type: ignore[attr-defined]
        super().on_run_start()

    def advance(self) -> None:
        super().advance()
        if self.after_batches:
            self.after_batches()

    def on_advance_end(self) -> None:
        """After each epoch, complete or not: runs the hooks at its end, then saves."""
        if self.restarted_mid_epoch:
            self.restarting = False  # else Lightning does not step the plateau schedules
        super().on_advance_end()
        if self.epoch_loop.decides is None or not self.epoch_loop.is_over:
            return
        progress = self.epoch_progress
        for part in (progress.total, progress.current):
            part.completed -= 1  # its value in the hooks, in which Lightning would save
        try:
            self.epoch_loop.decides.epoch_ended(self.trainer)
        finally:
            progress.increment_completed()

    def leave(self) -> NoReturn:
        """Leaves the fit, which ends with `Rebuilt`. Callbacks, loggers and data are torn down as
        after any fit; no hook takes it for the end of the training, or for a failure."""
        self.was_left = True
        raise _TunerExitException

    @property
    def loader_states(self) -> list[Any]:
        """The states of this rank's loaders that save their own; Lightning keeps those of rank 0.

        Where the length of an epoch is unknown, Lightning fetches a batch ahead. It is not trained
        on, so the states of before it count.
        """
        is_ahead = bool(getattr(self._data_fetcher, "batches", ()))
        return self._states_before if is_ahead else self._states()

    def keep_loader_states(self) -> None:
        """Called before each batch is fetched."""
        if self._data_fetcher is not None and self._data_fetcher.length is None:
            self._states_before = copy.deepcopy(self._states())

    def _states(self) -> list[Any]:
        return [] if self._combined_loader is None else self._combined_loader._state_dicts()

    def draw_seeds_again(self) -> None:
        """The loaders draw the seeds of this epoch once more, by generators that were restored
        after the first time."""
        iter(self._data_fetcher)  # type: ignore[arg-type]

    def forget_loaders(self) -> None:
        """The loaders are built again before the training: these may hold another epoch's order,
        or have begun before the position in it was known."""
        self._combined_loader = None

    def rebuild_loaders_with_state(self) -> None:
        """Loaders that save their own state, and that `configure_optimizers` has built already, are
        built again: Lightning restores it as it builds them."""
        if self._combined_loader_states_to_load and self._combined_loader is not None:
            assert self._data_fetcher is not None
            self._data_fetcher.teardown()
            self._combined_loader = None

    def stand_at(self, step: int, epoch: int) -> None:
        """What an evaluation logs has this step and epoch."""
        self.epoch_loop._batches_that_stepped = step
        self.epoch_progress.current.completed = epoch

    def _iteration_based_training(self) -> bool:
        """False. With `max_steps`, Lightning would take every resumed run for one inside an epoch:
        it would skip an epoch, or add a batch to one that had ended."""
        return False


def fit_loop_of(trainer: Trainer) -> FitLoop:
    """The loop of a Trainer of this package, as callbacks get one from Lightning."""
    assert isinstance(trainer.fit_loop, FitLoop)
    return trainer.fit_loop
