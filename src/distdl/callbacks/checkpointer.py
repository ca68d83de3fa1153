"""Writes checkpoints and ends attempts on request: what happens at each moment of a training.

The loops ask at each moment at which a save is possible (`loops/fit.py`). When a save is due says
`save_times.py`, what is in it `training_state.py`, and on what the ranks agree `rank_flags.py`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT

from distdl.callbacks import apart
from distdl.callbacks.best import Best
from distdl.callbacks.judged_run import JudgedRun
from distdl.callbacks.lean import LeanCallback
from distdl.callbacks.metrics import steps_of
from distdl.callbacks.module_state import ModuleState
from distdl.callbacks.rank_flags import RankFlags
from distdl.callbacks.save_times import SaveTimes
from distdl.callbacks.training_state import TrainingState
from distdl.checkpoint.saving import Saver, refuse_pickles
from distdl.config.schema import Checkpoint
from distdl.data.held_generators import HeldGenerators
from distdl.data.sampling import TrainPosition
from distdl.distributed import process_group
from distdl.distributed.agreement import refuse_uneven
from distdl.domains.domain import domain_of
from distdl.loops.averaged import averaged
from distdl.loops.decides import Decides
from distdl.loops.fit import fit_loop_of
from distdl.loops.trainer import Trainer as RunTrainer
from distdl.optim import uncovered
from distdl.optim.budget import TimeBudget, UsedTime
from distdl.ranks.stopping import StopRequest
from distdl.runs.checkpoints import BETWEEN_STEPS, CheckpointStore
from distdl.tracking import journal
from distdl.validation import misfits

log = logging.getLogger(__name__)


class Checkpointer(LeanCallback, Decides):
    """Writes checkpoints and ends attempts, as this module's docstring describes.

    Args:
        store: Where checkpoints are written.
        stop: Whether this process was asked to end.
        position: The position in the training data. This callback advances it.
        global_batch_size, accumulate, optimizer, seed, modules: See `TrainingState`.
        settings: The config's section `checkpoint`.
        monitor_typed: Whether the user has typed `checkpoint.monitor`, so that it is no default.
        budget: The time that the training has; None: no limit.
    """

    def __init__(
        self,
        store: CheckpointStore,
        stop: StopRequest,
        position: TrainPosition,
        *,
        global_batch_size: int | None,
        accumulate: int = 1,
        optimizer: dict[str, Any] | None = None,
        seed: int = 0,
        modules: ModuleState | None = None,
        settings: Checkpoint,
        monitor_typed: bool = False,
        budget: TimeBudget | None = None,
    ) -> None:
        self.stop = stop
        self.position = position
        self.settings = settings
        self.budget = budget
        self.clock = UsedTime() if budget is None else budget
        self.saver = Saver(store, keep_last=settings.keep_last, background=settings.background)
        self.times = SaveTimes(settings)
        self.best = Best(settings.monitor, settings.mode, typed=monitor_typed)
        self.flags = RankFlags(stop, self.saver, budget)
        self.search = JudgedRun(stop)
        self.state = TrainingState(
            position,
            self.best,
            global_batch_size=global_batch_size,
            accumulate=accumulate,
            optimizer=optimizer,
            seed=seed,
            modules=modules,
            clock=self.clock,
        )
        # Before this epoch everything is built again, as for a resume; None: never.
        self.rebuild_at: int | None = None

    # ------------------------------------------------------------------ the training begins

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning runs the setup of Checkpoint callbacks after this one.
        self.best.judge(domain_of(pl_module))
        if stage == "fit":
            misfits.refuse(trainer)
        apart.separate_folders(trainer, self.saver.store.folder)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        apart.separate_folders(trainer, self.saver.store.folder)  # a `setup` may set one
        # ZeRO has given the optimizers tensors of its own by now. distdl's has looked before.
        if trainer.optimizers and not isinstance(trainer.strategy, DeepSpeedStrategy):
            uncovered.look(pl_module, trainer.optimizers, speaks=trainer.is_global_zero)
        self.flags.connect()
        self._end_in_time(trainer)  # an earlier attempt may have used all of it

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.state.load(trainer, checkpoint)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_uneven(trainer.num_training_batches)
        self.times.saved(steps_of(trainer))
        if not self.settings.trust_pickle:
            refuse_pickles(trainer)
        held = HeldGenerators(trainer)
        self.held = held
        if trainer.is_global_zero:
            held.name_unrepeatable()
        self.state.begin(trainer, pl_module, held)
        if self.flags.stop_now(trainer):
            self._end(trainer)
        if self._rebuilds(trainer.current_epoch):  # the checkpoint was saved after that epoch
            self._leave(trainer)
        self.clock.begin()

    # -------------------------------------------------------------------- in the training

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.state.begin_epoch(trainer.current_epoch)
        if self.budget is not None:
            self.budget.pause()
        self._refuse_missing_metric(trainer)  # the last epoch's metrics are logged by now

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        self.state.begin_batch()
        if self.budget is not None:
            self.budget.begin_step(steps_before(trainer))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
    ) -> None:
        self.state.end_batch(trainer)
        if not fit_loop_of(trainer).epoch_loop.accumulates:
            self._end_in_time(trainer)

    def batch_ended(self, trainer: Trainer, *, before_validation: bool) -> None:
        self.state.before_validation = before_validation
        self._batch_ended(trainer, steps_of(trainer))
        self.state.before_validation = False

    def _batch_ended(self, trainer: Trainer, step: int) -> None:
        overdue = trainer.global_rank == 0 and self.times.is_overdue
        flags = self.flags.exchange(trainer, save=overdue)
        if fit_loop_of(trainer).epoch_loop.is_over:
            if flags.stop or flags.failed:  # the epoch's end handles them
                self.flags.repeat(trainer, flags._replace(save=False))
            return
        if flags.failed:
            self.saver.settle()
        if flags.stop:
            self._save(trainer, "signal")
            self._end(trainer)
        reason = self.times.reason(step, overdue=flags.save)
        if reason:
            self._save(trainer, reason)

    # ------------------------------------------------------------------------ in a validation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.flags.begin_validation(trainer)

    def cuts_validation(self, trainer: Trainer) -> bool:
        return self.flags.stop_validation(trainer)

    def validation_was_cut(self, trainer: Trainer, changed_weight: str) -> None:
        if trainer.sanity_checking:
            self._end(trainer)
        changed = next(filter(None, process_group.gather(changed_weight)), "")
        if changed:
            log.warning(
                "nothing is saved here, as the validation was cut short and has changed %s: a "
                "callback or the module has not put it back. A resume continues from the last "
                "checkpoint",
                changed,
            )
        else:
            self.state.before_validation = True
            self.state.in_cut_validation = True
            self._save(trainer, "signal")
        self._end(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            self.best.missing(trainer, early=True)  # called for its warning
        elif trainer.state.fn == "fit":
            self.best.validated = True
            if self.budget is not None:
                self.budget.pause()
            self.search.validated(trainer)

    def validated(self, trainer: Trainer, *, between_steps: bool) -> None:
        if self.best.improved(trainer):
            self._save(trainer, "best", between_steps=between_steps)
        # Between steps nothing is saved to go on from: at the epoch's end it is still missing.
        elif not between_steps and self.best.missing(trainer, early=True):
            self._save(trainer, "monitor")
            self._refuse_missing_metric(trainer)
        self.search.ask()
        if self.budget is not None and not between_steps:
            self.flags.stop_now(trainer)  # for the clock: a flag to stop stays up
            self._end_in_time(trainer)

    # ---------------------------------------------------------------------- ends

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not fit_loop_of(trainer).epoch_loop.is_over:
            # max_steps, max_time or early stopping ended the epoch before its last batch.
            self.flags.stop_now(trainer)
            self._save(trainer, "cut")
            self.saver.settle()

    def epoch_ended(self, trainer: Trainer) -> None:
        epoch = trainer.current_epoch + 1
        last = trainer.fit_loop.max_epochs == epoch or trainer.should_stop
        last = last or trainer.global_step >= trainer.max_steps > -1
        if not last:
            self.search.ask()
        stop = self.flags.stop_now(trainer)
        self._end_in_time(trainer)
        last = last or trainer.should_stop
        self.state.stand_before(epoch)
        best = self.best.improved(trainer)
        missing = self.best.missing(trainer)  # the next epoch would be refused
        due = stop or last or best or missing or self._rebuilds(epoch)
        if due or self.times.after_epoch(epoch):
            self._save(trainer, "epoch", best=best)
        if last:  # hooks at the end of the training may read the checkpoint
            self.saver.settle()
        elif stop:
            self._end(trainer)
        elif self._rebuilds(epoch):
            self._refuse_missing_metric(trainer)
            self._leave(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.saver.settle()
        self.saver.free()
        apart.save_swa(trainer, self.saver.store.folder.parent)
        self._refuse_missing_metric(trainer)
        self.best.warn_if_never_validated(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.saver.free()  # waits for the current write; not collective, as ranks may be gone

    def _end(self, trainer: Trainer) -> None:
        self.saver.settle()
        process_group.check_all(self.stop, f"at step {steps_of(trainer)}")

    def _end_in_time(self, trainer: Trainer) -> None:
        """Ends the training if its time is used up: on all ranks, as they know the same clock."""
        if self.budget is not None and self.budget.is_over:
            trainer.should_stop = True

    def _rebuilds(self, epoch: int) -> bool:
        return self.rebuild_at is not None and epoch >= self.rebuild_at

    def _leave(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            log.info("more weights are trained from here on: everything is built again for them")
        self.saver.settle()
        self.saver.free()
        fit_loop_of(trainer).leave()

    def _refuse_missing_metric(self, trainer: Trainer) -> None:
        if self.best.missing(trainer):
            self.saver.settle()
            self.best.refuse(trainer)

    # --------------------------------------------------------------------------------- saves

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.state.save(trainer, pl_module, checkpoint)

    def refuse_path(self, path: str | os.PathLike[str]) -> None:
        apart.refuse_path(path, self.saver.store.folder)

    def _save(
        self, trainer: Trainer, reason: str, best: bool = False, between_steps: bool = False
    ) -> None:
        """`between_steps`: only best.ckpt is written, and the run goes on as if it were not."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        step = steps_of(trainer)
        self.state.reason = reason
        self.state.between_steps = between_steps
        journal.write_all(trainer.loggers)  # a resume from here does not log its lines again
        inside = "" if reason == "epoch" else f"_step_{step:08d}"
        name = f"epoch_{trainer.current_epoch:03d}{inside}.ckpt"
        if between_steps:
            name = "best.ckpt"
        best = best or reason == "best"
        # What is saved between two steps, maybe in a hurry, is to go on from.
        settled = reason not in ("step", "time", "signal")
        assert isinstance(trainer, RunTrainer)
        facts = self._facts(trainer, step)
        with averaged(trainer, settled=settled):
            self.saver.save(trainer, trainer.state_to_save, name, best=best, **facts)
        if between_steps:
            return
        self.times.saved(step)
        self.flags.withdraw_save()  # this step's flags have requested the same save again

    def _facts(self, trainer: Trainer, step: int) -> dict[str, Any]:
        """What the manifest of the checkpoint says of it."""
        facts: dict[str, Any] = {
            "step": step,
            "epoch": trainer.current_epoch,
            "reason": self.state.reason,
            "world_size": trainer.world_size,
            "global_batch_size": self.state.global_batch_size,
            "monitor": self.best.monitor,
            "mode": self.best.mode,
        }
        if split := getattr(trainer.strategy, "split_at", None):  # of a pipeline
            facts["split"] = split
        facts["metrics"] = {k: float(v) for k, v in trainer.callback_metrics.items()}
        if self.state.between_steps:
            facts[BETWEEN_STEPS] = True
        return facts


def steps_before(trainer: Trainer) -> int:
    """`steps_of` as it was before the batch that is being trained."""
    by_hand = not trainer.lightning_module.automatic_optimization
    return steps_of(trainer) - by_hand
