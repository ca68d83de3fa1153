"""distdl's part of a checkpoint: what goes in, and how a resume takes it out.

It is what an exact resume needs and Lightning does not save: the position in the data, the global
batch, each rank's random number generators, the sums of metrics in this epoch, and more. The steps
of a resume are in `resume_state.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from distdl.callbacks import rank_buffers, resume_state
from distdl.callbacks.best import Best
from distdl.callbacks.module_state import ModuleState
from distdl.data.held_generators import HeldGenerators
from distdl.data.sampling import TrainPosition
from distdl.distributed import process_group
from distdl.domains.domain import domain_of
from distdl.loops.epoch_metrics import epoch_metrics, restore_epoch_metrics
from distdl.loops.fit import fit_loop_of
from distdl.optim import learning_rates
from distdl.optim.budget import UsedTime
from distdl.runs.checkpoints import BETWEEN_STEPS

log = logging.getLogger(__name__)

KEY = "distdl"
BUDGET = "budget"
BETWEEN = (
    "this checkpoint was saved between batches whose gradients are accumulated, and has none of "
    "them: the training goes on, but not as it did then"
)


class TrainingState:
    """The state of one training, beside that of the trainer, the module and the optimizers.

    Args:
        position: The position in the training data.
        best: The best value of the metric that is monitored.
        global_batch_size: Samples per optimizer step over all ranks, as in the config. Used if the
            loaders do not state their batch size; None if unknown.
        accumulate: Batches per optimizer step.
        optimizer: The config's optimizer node, to rescale the learning rate if a run resumes with
            another global batch; None if the module configures its own optimizer.
        seed: Reseeds the generators if a run resumes at another world size.
        modules: Adds the state of layers to checkpoints.
        clock: The time that the training has used, which goes on while it has no limit.

    Attributes:
        rates: The learning rates with which the optimizers of this run were built.
        classes: The names of classes in the checkpoint that was loaded: `Domain.names`.
        reason: Why the newest checkpoint was saved, as its manifest says.
        between_steps: Whether it was saved between batches whose gradients are accumulated.
        before_validation: Whether a validation is about to begin, with which a resume begins.
        in_cut_validation: Whether the validation was cut short, so that it counts for nothing.
    """

    def __init__(
        self,
        position: TrainPosition,
        best: Best,
        *,
        global_batch_size: int | None,
        accumulate: int,
        optimizer: dict[str, Any] | None,
        seed: int,
        modules: ModuleState | None,
        clock: UsedTime,
    ) -> None:
        self.position = position
        self.best = best
        self.accumulate = accumulate
        self.optimizer = optimizer
        self.seed = seed
        self.modules = modules
        self.clock = clock
        self.rates: list[list[float]] | None = None
        self.classes: list[Any] | None = None
        self.reason = ""
        self.between_steps = False
        self.before_validation = False
        self.in_cut_validation = False
        self._declared = global_batch_size
        self._stepped: set[Optimizer] = set()  # in the newest batch
        self._given_before = False  # rank_buffers.will_be_given, before any validation
        self._loaded: dict[str, Any] | None = None

    @property
    def global_batch_size(self) -> int | None:
        """Samples per optimizer step over all ranks; None if unknown."""
        samples = self.position.samples
        return samples * self.accumulate if samples else self._declared

    @property
    def samples_per_batch(self) -> int:
        """Samples by which a batch advances the position; 0 if unknown."""
        return self.position.per_batch or (self._declared or 0) // self.accumulate

    def batch_ratio(self, loaded: Mapping[str, Any]) -> float:
        """The factor by which a checkpoint's rate changes with this run's global batch."""
        before = loaded.get("global_batch_size")
        now = self.global_batch_size
        if not (before and now and self.optimizer):
            return 1.0
        rate = learning_rates.rate_of(self.optimizer, now)
        return rate / learning_rates.rate_of(self.optimizer, before)

    # ---------------------------------------------------------------- as the training goes on

    def begin(self, trainer: Trainer, module: LightningModule, held: HeldGenerators) -> None:
        """The training starts: puts back what `load` has taken from a checkpoint. Collective."""
        built = [optimizer.param_groups for optimizer in trainer.optimizers]
        self.rates = self.rates or resume_state.built_rates(built)
        for optimizer in trainer.optimizers:
            if not module.automatic_optimization and isinstance(optimizer, Optimizer):
                optimizer.register_step_post_hook(lambda stepped, *_: self._stepped.add(stepped))
        if self._loaded is not None:
            self._restore(trainer, module, held, self._loaded)
            self._loaded = None
        self._given_before = rank_buffers.will_be_given(trainer)

    def begin_epoch(self, epoch: int) -> None:
        if self.position.epoch != epoch:
            self.stand_before(epoch)

    def begin_batch(self) -> None:
        self._stepped.clear()

    def end_batch(self, trainer: Trainer) -> None:
        self.position.consumed += self.samples_per_batch
        self._given_before = rank_buffers.will_be_given(trainer)

    def stand_before(self, epoch: int) -> None:
        """The next batch is the first one of an epoch."""
        self.position.epoch = epoch
        self.position.consumed = 0

    # ------------------------------------------------------------------------ into a checkpoint

    def save(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the state, and adapts Lightning's to the moment of the save. Collective."""
        epoch_loop = fit_loop_of(trainer).epoch_loop
        data = trainer.datamodule  # type: ignore[attr-defined]
        # A validation that was cut short counts for nothing here, too.
        given = self._given_before
        if not self.in_cut_validation:
            given = rank_buffers.will_be_given(trainer)
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
            "classes": domain_of(data, module).names(data),
            **self.best.state(),
            "rng": process_group.gather(epoch_loop.generators or epoch_loop.rng_state()),
            "epoch_metrics": process_group.gather(epoch_metrics(trainer)),
            "loaders": process_group.gather(fit_loop_of(trainer).loader_states),
            BETWEEN_STEPS: self.between_steps,
            BUDGET: process_group.gather(self.clock.state())[0],
            rank_buffers.KEY: rank_buffers.of_ranks(trainer, given),
            **resume_state.of_parameters(trainer, self._waiting(trainer)),
        }
        if self.modules is not None:
            self.modules.save(trainer, module, checkpoint)
        if self.before_validation:
            resume_state.restart_validation(checkpoint["loops"]["fit_loop"])
        if self.reason == "cut":
            resume_state.reopen_epoch(checkpoint["loops"]["fit_loop"])

    def _waiting(self, trainer: Trainer) -> list[Optimizer]:
        """The optimizers whose gradients wait for a step that a resumed run takes."""
        if not trainer.lightning_module.automatic_optimization:
            return [each for each in trainer.optimizers if each not in self._stepped]
        accumulates = fit_loop_of(trainer).epoch_loop.accumulates
        return trainer.optimizers if self.reason == "cut" and accumulates else []

    # ---------------------------------------------------------------------- out of a checkpoint

    def load(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Takes the state as a checkpoint is read. What needs the loaders and the optimizers waits
        for `begin`."""
        loaded = checkpoint.get(KEY)
        self.classes = (loaded or {}).get("classes")
        if trainer.state.fn != "fit":
            return
        resume_state.remove_rate_finder(trainer)
        used = resume_state.used_by_timer(checkpoint)
        self.clock.load((loaded or {}).get(BUDGET) or {"used": used})
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

    def _restore(
        self,
        trainer: Trainer,
        module: LightningModule,
        held: HeldGenerators,
        loaded: dict[str, Any],
    ) -> None:
        loop = fit_loop_of(trainer)
        seed = self.seed + trainer.global_step
        share, shares = resume_state.shares_of(trainer)
        same = loaded.get("shares", shares) == shares
        own = trainer.global_rank if same else None
        resume_state.restore_rng(loaded["rng"], held, seed, own, share)
        resume_state.restore_parameters(module, loaded)
        rank_buffers.restore(trainer, loaded)
        if loaded.get(BETWEEN_STEPS) and trainer.is_global_zero:
            log.warning("%s", BETWEEN)
        if trainer.current_epoch > 0 and self.position.consumed == 0:
            # This epoch's loaders drew their seeds before `restore_rng`: draw them again.
            loop.draw_seeds_again()
        resume_state.set_up_epoch_again(trainer)
        if loop.restarted_mid_epoch:
            restore_epoch_metrics(trainer, loaded.get("epoch_metrics", ()))
        # Not in `load`: the loaders, which know the batch size, are built later.
        resume_state.recount_batches(trainer, loaded, self.samples_per_batch)
        before = loaded["global_batch_size"]
        resume_state.rescale(trainer, self.optimizer, before, self.global_batch_size)
