"""When a checkpoint is saved, what is in it, and when an attempt ends on request.

The loops ask at each moment at which a save is possible (`loops/fit.py`). All ranks agree on the
answer. A checkpoint also holds state that Lightning does not save: the position in the data, the
global batch, each rank's random number generators, and the sums of metrics in this epoch.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer

from distdl.callbacks import apart, rank_buffers, resume_state
from distdl.callbacks.best import Best
from distdl.callbacks.lean import LeanCallback
from distdl.callbacks.metrics import steps_of
from distdl.callbacks.module_state import ModuleState
from distdl.checkpoint.saving import Saver, refuse_pickles
from distdl.config.schema import Checkpoint
from distdl.data.held_generators import HeldGenerators
from distdl.data.sampling import TrainPosition
from distdl.distributed import process_group
from distdl.distributed.agreement import Agreement, least_of_all, refuse_uneven
from distdl.domains.domain import domain_of
from distdl.job import JobState
from distdl.loops.averaged import Averages, averaged
from distdl.loops.decides import Decides
from distdl.loops.epoch_metrics import epoch_metrics, restore_epoch_metrics
from distdl.loops.fit import fit_loop_of
from distdl.loops.trainer import Trainer as RunTrainer
from distdl.optim import learning_rates
from distdl.optim.averages import exchanges
from distdl.optim.budget import Reading, TimeBudget
from distdl.ranks.stopping import StopRequest
from distdl.runs.checkpoints import BETWEEN_STEPS, CheckpointStore
from distdl.runs.verdicts import DONE, Verdicts
from distdl.tracking.journal import Journal
from distdl.validation import misfits

log = logging.getLogger(__name__)

KEY = "distdl"
BUDGET = "budget"
SAVE = 1  # the index of the save flag in `Checkpointer._flags`
BETWEEN = (
    "this checkpoint was saved between batches whose gradients are accumulated, and has none of "
    "them: the training goes on, but not as it did then"
)


def rounds(trainer: Trainer) -> bool:
    """Whether the module exchanges weights for a validation by its optimizer's arithmetic: what is
    put back is rounded, so a validation may not be run twice."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    kept = any(isinstance(each, Averages) for each in callbacks)
    return not kept and any(map(exchanges, trainer.optimizers))


def steps_before(trainer: Trainer) -> int:
    """`steps_of` as it was before the batch that is being trained."""
    by_hand = not trainer.lightning_module.automatic_optimization
    return steps_of(trainer) - by_hand


class Checkpointer(LeanCallback, Decides):
    """Writes checkpoints and ends attempts, as this module's docstring describes.

    Args:
        store: Where checkpoints are written.
        stop: Whether this process was asked to end.
        position: The position in the training data. This callback advances it.
        global_batch_size: Samples per optimizer step over all ranks, as in the config. Used if the
            loaders do not state their batch size; None if unknown.
        accumulate: Batches per optimizer step.
        optimizer: The config's optimizer node, to rescale the learning rate if a run resumes with
            another global batch; None if the module configures its own optimizer.
        seed: Reseeds the generators if a run resumes at another world size.
        modules: Adds the state of layers to checkpoints.
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
        self.optimizer = optimizer
        self.modules = modules
        self.settings = settings
        self.saver = Saver(store, keep_last=settings.keep_last, background=settings.background)
        self._declared = global_batch_size
        self.accumulate = accumulate
        self.budget = budget
        self._no_reading = () if budget is None else Reading().numbers
        self.seed = seed
        minutes = settings.every_minutes
        self.every_seconds = minutes * 60 if minutes else math.inf
        self.best = Best(settings.monitor, settings.mode, typed=monitor_typed)
        # Before this epoch everything is built again, as for a resume; None: never.
        self.rebuild_at: int | None = None
        self.verdicts: Verdicts | None = None  # on rank 0 of a trial of a search
        # The step that the journal has for a validation of which the search was not asked yet.
        self._unjudged: int | None = None
        self.rates: list[list[float]] | None = None  # as the optimizers of this run were built
        self.classes: list[Any] | None = None  # of the checkpoint that was loaded: `Domain.names`
        self._saved_step = -1
        self._stepped: set[Optimizer] = set()  # in the newest batch
        self._validates = self._between_steps = False
        self._was_cut = False  # the newest validation
        self._given_before = False  # rank_buffers.will_be_given, before any validation
        self._saved_at = time.monotonic()
        self._reason = ""
        self._loaded: dict[str, Any] | None = None
        self._common_batches = 0.0

    @property
    def global_batch_size(self) -> int | None:
        """Samples per optimizer step over all ranks; None if unknown."""
        samples = self.position.samples
        return samples * self.accumulate if samples else self._declared

    @property
    def samples_per_batch(self) -> int:
        """Samples by which a batch advances the position; 0 if unknown."""
        return self.position.per_batch or (self._declared or 0) // self.accumulate

    # -------------------------------------------------------------------- when to save or end

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning runs the setup of Checkpoint callbacks after this one.
        self.best.judge(domain_of(pl_module))
        if stage == "fit":
            misfits.refuse(trainer)
        apart.separate_folders(trainer, self.saver.store.folder)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        apart.separate_folders(trainer, self.saver.store.folder)  # a `setup` may set one
        self._agreement = Agreement(3 + len(self._no_reading))
        self._end_in_time(trainer)  # an earlier attempt may have used all of it

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = fit_loop_of(trainer)
        refuse_uneven(trainer.num_training_batches)
        built = [optimizer.param_groups for optimizer in trainer.optimizers]
        self.rates = self.rates or resume_state.built_rates(built)
        self._saved_step = steps_of(trainer)
        self._saved_at = time.monotonic()
        for optimizer in trainer.optimizers:
            if not pl_module.automatic_optimization and isinstance(optimizer, Optimizer):
                optimizer.register_step_post_hook(lambda stepped, *_: self._stepped.add(stepped))
        if not self.settings.trust_pickle:
            refuse_pickles(trainer)
        held = self.held = HeldGenerators(trainer)
        if trainer.is_global_zero:
            held.name_unrepeatable()
        if self._loaded is not None:
            seed = self.seed + trainer.global_step
            share, shares = resume_state.shares_of(trainer)
            same = self._loaded.get("shares", shares) == shares
            own = trainer.global_rank if same else None
            resume_state.restore_rng(self._loaded["rng"], held, seed, own, share)
            resume_state.restore_parameters(pl_module, self._loaded)
            rank_buffers.restore(trainer, self._loaded)
            if self._loaded.get(BETWEEN_STEPS) and trainer.is_global_zero:
                log.warning("%s", BETWEEN)
            if trainer.current_epoch > 0 and self.position.consumed == 0:
                # This epoch's loaders drew their seeds before `restore_rng`: draw them again.
                loop.draw_seeds_again()
            resume_state.set_up_epoch_again(trainer)
            if loop.restarted_mid_epoch:
                restore_epoch_metrics(trainer, self._loaded.get("epoch_metrics", ()))
            # Not in `on_load_checkpoint`: the loaders, which know the batch size, are built later.
            resume_state.recount_batches(trainer, self._loaded, self.samples_per_batch)
            before = self._loaded["global_batch_size"]
            resume_state.rescale(trainer, self.optimizer, before, self.global_batch_size)
            self._loaded = None
        self._given_before = rank_buffers.will_be_given(trainer)
        if self._stop_now(trainer):
            self._end(trainer)
        if self._rebuilds(trainer.current_epoch):  # the checkpoint was saved after that epoch
            self._leave(trainer)
        if self.budget is not None:
            self.budget.begin()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.position.epoch != trainer.current_epoch:
            self.position.epoch = trainer.current_epoch
            self.position.consumed = 0
        if self.budget is not None:
            self.budget.pause()
        self._refuse_missing_metric(trainer)  # the last epoch's metrics are logged by now

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._stepped.clear()
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
        self.position.consumed += self.samples_per_batch
        self._given_before = rank_buffers.will_be_given(trainer)
        if not fit_loop_of(trainer).epoch_loop.accumulates:
            self._end_in_time(trainer)

    def batch_ended(self, trainer: Trainer, *, before_validation: bool) -> None:
        self._validates = before_validation
        self._batch_ended(trainer, steps_of(trainer))
        self._validates = False

    def _batch_ended(self, trainer: Trainer, step: int) -> None:
        elapsed = time.monotonic() - self._saved_at
        overdue = trainer.global_rank == 0 and elapsed >= self.every_seconds
        stop, save, failed = self._exchange(trainer, *self._flags(overdue))
        if fit_loop_of(trainer).epoch_loop.is_over:
            if stop or failed:  # exchange these flags again: the epoch's end handles them
                self._exchange(trainer, stop, False, failed)
            return
        self._obey(trainer, stop, failed)
        every = self.settings.every_n_steps or math.inf
        by_step = step % every == 0
        soon = (step + 1) % every == 0
        if (by_step or (save and not soon)) and step != self._saved_step:
            self._save(trainer, "step" if by_step else "time")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        loop = fit_loop_of(trainer).epoch_loop
        # Ranks may have different numbers of batches: exchange flags only in common ones.
        self._common_batches = least_of_all(sum(loop.val_loop.max_batches))
        if loop.accumulates or rounds(trainer):
            self._common_batches = 0  # it cannot be cut short

    def cuts_validation(self, trainer: Trainer) -> bool:
        if not self._common_batches:
            return False
        self._common_batches -= 1
        stop, _save, failed = self._exchange(trainer, *self._flags())
        if failed:
            self.saver.settle()
        return stop

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
            self._validates = self._was_cut = True
            self._save(trainer, "signal")
        self._end(trainer)

    def _obey(self, trainer: Trainer, stop: bool, failed: bool) -> None:
        if failed:
            self.saver.settle()
        if stop:
            self._save(trainer, "signal")
            self._end(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            self.best.missing(trainer, early=True)  # called for its warning
        elif trainer.state.fn == "fit":
            self.best.validated = True
            if self.budget is not None:
                self.budget.pause()
            self._unjudged = self._write_journal(trainer) if self.verdicts else None

    def validated(self, trainer: Trainer, *, between_steps: bool) -> None:
        if self.best.improved(trainer):
            self._save(trainer, "best", between_steps=between_steps)
        # Between steps nothing is saved to go on from: at the epoch's end it is still missing.
        elif not between_steps and self.best.missing(trainer, early=True):
            self._save(trainer, "monitor")
            self._refuse_missing_metric(trainer)
        self._ask_search()
        if self.budget is not None and not between_steps:
            self._stop_now(trainer)  # for the clock: a flag to stop stays up
            self._end_in_time(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not fit_loop_of(trainer).epoch_loop.is_over:
            # max_steps, max_time or early stopping ended the epoch before its last batch.
            self._stop_now(trainer)
            self._save(trainer, "cut")
            self.saver.settle()

    def epoch_ended(self, trainer: Trainer) -> None:
        epoch = trainer.current_epoch + 1
        last = trainer.fit_loop.max_epochs == epoch or trainer.should_stop
        last = last or trainer.global_step >= trainer.max_steps > -1
        if not last:
            self._ask_search()
        stop = self._stop_now(trainer)
        self._end_in_time(trainer)
        last = last or trainer.should_stop
        self.position.epoch = epoch
        self.position.consumed = 0
        best = self.best.improved(trainer)
        missing = self.best.missing(trainer)  # the next epoch would be refused
        due = stop or last or best or missing or self._rebuilds(epoch)
        if due or epoch % self.settings.every_n_epochs == 0:
            self._save(trainer, "epoch", best=best)
        if last:  # hooks at the end of the training may read the checkpoint
            self.saver.settle()
        elif stop:
            self._end(trainer)
        elif self._rebuilds(epoch):
            self._refuse_missing_metric(trainer)
            self._leave(trainer)

    def _rebuilds(self, epoch: int) -> bool:
        return self.rebuild_at is not None and epoch >= self.rebuild_at

    def _leave(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            log.info("more weights are trained from here on: everything is built again for them")
        self.saver.settle()
        self.saver.free()
        fit_loop_of(trainer).leave()

    def _ask_search(self) -> None:
        """Raises the flag to stop, if the search whose trial this run is says so of the validation
        that has just ended. The other ranks see the flag as they see a signal's."""
        if self.verdicts is None or self._unjudged is None:
            return
        word = self.verdicts.after(self._unjudged)
        self._unjudged = None
        if word in DONE and not self.stop:
            self.stop.ask(JobState.PRUNED, DONE[word])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.saver.settle()
        self.saver.free()
        apart.save_swa(trainer, self.saver.store.folder.parent)
        self._refuse_missing_metric(trainer)
        self.best.warn_if_never_validated(trainer)

    def refuse_path(self, path: str | os.PathLike[str]) -> None:
        apart.refuse_path(path, self.saver.store.folder)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.saver.free()  # waits for the current write; not collective, as ranks may be gone

    def _flags(self, save: bool = False) -> tuple[bool, bool, bool]:
        """This rank's flags: it was asked to stop, a save is due, a save has failed."""
        return bool(self.stop), save, bool(self.saver.error)

    def _exchange(
        self, trainer: Trainer, *flags: bool, now: bool = False
    ) -> tuple[bool, bool, bool]:
        """The flags that the ranks have raised. With them goes what rank 0's clock says."""
        exchange = self._agreement.now if now else self._agreement.exchange
        if self.budget is None or not self.budget.has_begun:
            stop, save, failed, *_ = exchange(*flags, *self._no_reading)
            return bool(stop), bool(save), bool(failed)
        reading = self.budget.look(steps_of(trainer))
        numbers = reading.numbers if trainer.global_rank == 0 else self._no_reading
        stop, save, failed, *seen = exchange(*flags, *numbers)
        self.budget.agreed(Reading.of(seen))
        return bool(stop), bool(save), bool(failed)

    def _stop_now(self, trainer: Trainer) -> bool:
        """Whether any rank was asked to end. Raises if a save has failed. Collective, and slow."""
        stop, _, failed = self._exchange(trainer, *self._flags(), now=True)
        if failed:
            self.saver.settle()
        return stop

    def _end_in_time(self, trainer: Trainer) -> None:
        """Ends the training if its time is used up: on all ranks, as they know the same clock."""
        if self.budget is not None and self.budget.is_over:
            trainer.should_stop = True

    # ------------------------------------------------------------- the state in a checkpoint

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        epoch_loop = fit_loop_of(trainer).epoch_loop
        data = trainer.datamodule  # type: ignore[attr-defined]
        # A validation that was cut short counts for nothing here, too.
        given = self._given_before if self._was_cut else rank_buffers.will_be_given(trainer)
        checkpoint[KEY] = {
            "epoch": self.position.epoch,
            "consumed": self.position.consumed,
            "batch_sizes": [*self.position.sizes],
            "seeds_apart": self.position.seeds_apart,
            "global_batch_size": self.global_batch_size,
            "samples_per_batch": self.samples_per_batch,
            "rates": self.rates,
            "world_size": trainer.world_size,
            "shares": resume_state.shares_of(trainer)[1],
            "classes": domain_of(data, pl_module).names(data),
            **self.best.state(),
            "rng": process_group.gather(epoch_loop.generators or epoch_loop.rng_state()),
            "epoch_metrics": process_group.gather(epoch_metrics(trainer)),
            "loaders": process_group.gather(fit_loop_of(trainer).loader_states),
            BETWEEN_STEPS: self._between_steps,
            BUDGET: process_group.gather(self.budget.state())[0] if self.budget else None,
            rank_buffers.KEY: rank_buffers.of_ranks(trainer, given),
            **resume_state.of_parameters(trainer, self._waiting(trainer)),
        }
        if self.modules is not None:
            self.modules.save(trainer, pl_module, checkpoint)
        if self._validates:
            resume_state.restart_validation(checkpoint["loops"]["fit_loop"])
        if self._reason == "cut":
            resume_state.reopen_epoch(checkpoint["loops"]["fit_loop"])

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        loaded = checkpoint.get(KEY)
        self.classes = (loaded or {}).get("classes")
        if trainer.state.fn != "fit":
            return
        resume_state.remove_rate_finder(trainer)
        if self.budget is not None:
            used = resume_state.used_by_timer(checkpoint)
            self.budget.load((loaded or {}).get(BUDGET) or {"used": used})
        if loaded is None:
            return
        self.position.epoch = loaded["epoch"]
        self.position.consumed = loaded["consumed"]
        self.position.sizes = [(start, size) for start, size in loaded.get("batch_sizes", ())]
        self.position.seeds_apart = loaded.get("seeds_apart", False)
        if "loaders" in loaded:
            states = loaded["loaders"]
            rank = trainer.global_rank
            has_states = resume_state.give_loader_states(checkpoint, states, rank)
            self.position.has_states = has_states
        self.rates = loaded.get("rates")
        self.best.load(loaded)
        self._loaded = loaded

    def batch_ratio(self, loaded: Mapping[str, Any]) -> float:
        """The factor by which a checkpoint's rate changes with this run's global batch."""
        before = loaded.get("global_batch_size")
        now = self.global_batch_size
        if not (before and now and self.optimizer):
            return 1.0
        rate = learning_rates.rate_of(self.optimizer, now)
        return rate / learning_rates.rate_of(self.optimizer, before)

    # --------------------------------------------------------------------------------- saving

    def _waiting(self, trainer: Trainer) -> list[Optimizer]:
        """The optimizers whose gradients wait for a step that a resumed run takes."""
        if not trainer.lightning_module.automatic_optimization:
            return [each for each in trainer.optimizers if each not in self._stepped]
        accumulates = fit_loop_of(trainer).epoch_loop.accumulates
        return trainer.optimizers if self._reason == "cut" and accumulates else []

    def _save(
        self, trainer: Trainer, reason: str, best: bool = False, between_steps: bool = False
    ) -> None:
        """`between_steps`: only best.ckpt is written, and the run goes on as if it were not."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        step = steps_of(trainer)
        epoch = trainer.current_epoch
        inside = "" if reason == "epoch" else f"_step_{step:08d}"
        self._reason = reason
        self._between_steps = between_steps
        self._write_journal(trainer)  # a resume from here does not log its lines again
        facts: dict[str, Any] = {
            "step": step,
            "epoch": epoch,
            "reason": reason,
            "world_size": trainer.world_size,
            "global_batch_size": self.global_batch_size,
            "monitor": self.best.monitor,
            "mode": self.best.mode,
        }
        if split := getattr(trainer.strategy, "split_at", None):  # of a pipeline
            facts["split"] = split
        facts["metrics"] = {k: float(v) for k, v in trainer.callback_metrics.items()}
        if between_steps:
            facts[BETWEEN_STEPS] = True
        name = "best.ckpt" if between_steps else f"epoch_{epoch:03d}{inside}.ckpt"
        assert isinstance(trainer, RunTrainer)
        best = best or reason == "best"
        # What is saved between two steps, maybe in a hurry, is to go on from.
        settled = reason not in ("step", "time", "signal")
        with averaged(trainer, settled=settled):
            self.saver.save(trainer, trainer.state_to_save, name, best=best, **facts)
        if between_steps:
            return
        self._saved_step = step
        self._saved_at = time.monotonic()
        self._agreement.withdraw(SAVE)  # this step's flags have requested the same save again

    def _write_journal(self, trainer: Trainer) -> int:
        """Writes what was logged so far; the step of its last line."""
        step = 0
        for logger in trainer.loggers:
            if isinstance(logger, Journal):
                logger.flush()
                step = logger.last_step
        return step

    def _refuse_missing_metric(self, trainer: Trainer) -> None:
        if self.best.missing(trainer):
            self.saver.settle()
            self.best.refuse(trainer)

    def _end(self, trainer: Trainer) -> None:
        self.saver.settle()
        process_group.check_all(self.stop, f"at step {steps_of(trainer)}")
