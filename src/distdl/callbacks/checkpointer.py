"""Writes checkpoints, and ends an attempt that was asked to end, on all ranks at the same step.

Three moments, each of which Lightning (2.6) can go on from:

- after an optimizer step inside an epoch (not its last: the epoch's end follows at once),
- inside a validation, whose loop then starts again from its first batch,
- at the end of an epoch, also of one that was cut short, which then goes on.

What Lightning does not keep is added: the position in the data, the global batch, and each rank's
random number generators.
"""

from __future__ import annotations

import logging
import math
import random
import time
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from distdl import cluster, optim
from distdl.callbacks.agreement import Agreement
from distdl.checkpoint import CheckpointStore
from distdl.data.sampling import TrainPosition
from distdl.job import JobState
from distdl.stopping import Stopped, StopRequest

log = logging.getLogger(__name__)

KEY = "distdl"


class Checkpointer(Callback):
    """See the module.

    Args:
        store: Where checkpoints go.
        stop: Whether this process was asked to end.
        position: The position in the training data; this callback moves it.
        global_batch_size: Samples per optimizer step over all ranks, or None if the data does not
            say.
        accumulate: Batches per optimizer step.
        optimizer: The config's optimizer node, to scale the learning rate when a run goes on with
            another global batch.
        seed: Reseeds the generators when a run goes on at another world size.
        every_n_steps, every_minutes, every_n_epochs, keep_last, monitor, mode: As in
            `conf/distdl.yaml`.
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
        every_n_steps: int | None = None,
        every_minutes: float | None = 10,
        every_n_epochs: int = 1,
        keep_last: int = 2,
        monitor: str | None = None,
        mode: str = "max",
    ) -> None:
        self.store, self.stop, self.position = store, stop, position
        self.global_batch_size, self.seed = global_batch_size, seed
        self.samples_per_batch = global_batch_size // accumulate if global_batch_size else 0
        self.optimizer = optimizer
        self.every_n_steps, self.every_n_epochs = every_n_steps, every_n_epochs
        self.every_seconds = every_minutes * 60 if every_minutes else math.inf
        self.keep_last, self.monitor, self.mode = keep_last, monitor, mode
        self.best: float | None = None
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._reason = ""
        self._warned = False
        self._kept: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------- moments

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning would broadcast a flag and read it back (a device sync) on every step.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self._agreement = Agreement(2)
        self._saved_step = trainer.global_step
        self._saved_at = time.monotonic()
        if self._kept is not None:
            restore_rng(self._kept["rng"], self.seed + trainer.global_step, trainer.global_rank)
            self._rescale(trainer, self._kept["global_batch_size"])
            self._kept = None
        if self._agreement.now(bool(self.stop), False)[0]:
            self._end(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.position.epoch != trainer.current_epoch:
            self.position.epoch, self.position.consumed = trainer.current_epoch, 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loop = trainer.fit_loop.epoch_loop
        self.position.consumed += self.samples_per_batch
        if loop._should_accumulate():
            return  # half an optimizer step cannot be saved
        step = trainer.global_step
        overdue = trainer.global_rank == 0 and self._overdue()
        stop, save = self._agreement.exchange(bool(self.stop), overdue)
        if loop._num_ready_batches_reached():
            if stop:  # seen again at the epoch's end, and by every rank
                self._agreement.exchange(True, False)
            return
        if stop:
            self._save(trainer, "signal")
            self._end(trainer)
        by_step = bool(self.every_n_steps) and step % (self.every_n_steps or 1) == 0
        if (by_step or save) and step != self._saved_step:
            self._save(trainer, "step" if by_step else "time")

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if self._agreement.exchange(bool(self.stop), False)[0]:
            self._save(trainer, "signal")
            self._end(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached() and self._is_best(trainer):
            self._save(trainer, "best")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stop = self._agreement.now(bool(self.stop), False)[0]
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            # max_steps, max_time or early stopping ended it before its last batch.
            self._save(trainer, "cut")
            return
        epoch = trainer.current_epoch + 1
        self.position.epoch, self.position.consumed = epoch, 0
        last = trainer.fit_loop.max_epochs == epoch or trainer.should_stop
        last = last or trainer.global_step == trainer.max_steps
        best = self._is_best(trainer)
        if stop or last or best or epoch % self.every_n_epochs == 0:
            self._save(trainer, "epoch", best=best)
        if stop and not last:
            self._end(trainer)

    # ---------------------------------------------------------------------------- what is kept

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[KEY] = {
            "epoch": self.position.epoch,
            "consumed": self.position.consumed,
            "global_batch_size": self.global_batch_size,
            "samples_per_batch": self.samples_per_batch,
            "world_size": trainer.world_size,
            "best": self.best,
            "rng": cluster.gather(rng_state()),
        }
        if trainer.validating and self._reason == "signal":
            restart_validation(checkpoint["loops"]["fit_loop"])
        if self._reason == "cut":
            reopen_epoch(checkpoint["loops"]["fit_loop"])

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        kept = checkpoint.get(KEY)
        if kept is None or trainer.state.fn != "fit":
            return
        self.position.epoch, self.position.consumed = kept["epoch"], kept["consumed"]
        self.best, self._kept = kept["best"], kept
        if self.samples_per_batch and kept["samples_per_batch"] != self.samples_per_batch:
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            recount_batches(progress, kept["consumed"], self.samples_per_batch)

    def _rescale(self, trainer: Trainer, before: int | None) -> None:
        """Another global batch: the rate follows its rule, the schedule keeps its epoch."""
        now = self.global_batch_size
        if not before or not now or before == now or not self.optimizer:
            return
        rule = self.optimizer.get("lr_scaling", "none")
        reference = self.optimizer.get("lr_reference_batch", 256)
        old, new = (optim.scale_lr(self.optimizer["lr"], b, rule, reference) for b in (before, now))
        for entry in trainer.lr_scheduler_configs:
            optim.rescale_schedule(
                entry.scheduler,
                trainer.optimizers[0],
                old_lr=old,
                new_lr=new,
                step_ratio=before / now,
            )
        log.warning(
            "the global batch was %d and is %d: the learning rate goes from %.4g to %.4g (%s)",
            before,
            now,
            old,
            new,
            rule,
        )

    # --------------------------------------------------------------------------------- saving

    def _overdue(self) -> bool:
        return time.monotonic() - self._saved_at >= self.every_seconds

    def _save(self, trainer: Trainer, reason: str, best: bool = False) -> None:
        step, epoch = trainer.global_step, trainer.current_epoch
        best = best or reason == "best"
        name = f"epoch_{epoch:03d}.ckpt"
        if reason != "epoch":
            name = f"epoch_{epoch:03d}_step_{step:08d}.ckpt"
        started = time.monotonic()
        self._reason = reason
        trainer.save_checkpoint(self.store.temporary(name), weights_only=False)
        if trainer.is_global_zero:
            path = self.store.publish(
                name,
                step=step,
                epoch=epoch,
                reason=reason,
                world_size=trainer.world_size,
                global_batch_size=self.global_batch_size,
                metrics={k: float(v) for k, v in trainer.callback_metrics.items()},
            )
            self.store.alias("last.ckpt", path)
            if best:
                self.store.alias("best.ckpt", path)
            self.store.prune(self.keep_last)
            log.info("checkpoint %s (%s, %.1f s)", name, reason, time.monotonic() - started)
        trainer.strategy.barrier("distdl.checkpoint")
        self._saved_step, self._saved_at = step, time.monotonic()

    def _is_best(self, trainer: Trainer) -> bool:
        """Whether the monitored metric is the best so far; all ranks hold the same value."""
        if self.monitor is None:
            return False
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            validated = any(k.startswith("val") for k in trainer.callback_metrics)
            if validated and not self._warned and trainer.is_global_zero:
                self._warned = True
                log.warning(
                    "checkpoint.monitor=%s is not logged, so no best.ckpt is written; logged: %s",
                    self.monitor,
                    ", ".join(sorted(trainer.callback_metrics)),
                )
            return False
        score = float(value)
        better = self.best is None or (
            score > self.best if self.mode == "max" else score < self.best
        )
        if better:
            self.best = score
        return better

    def _end(self, trainer: Trainer) -> None:
        # Only some ranks may have been signalled; all end in the same way.
        state, signal = max(cluster.gather((str(self.stop.state or ""), self.stop.signal)))
        raise Stopped(JobState(state), f"{signal} at step {trainer.global_step}")


def restart_validation(fit_loop: dict[str, Any]) -> None:
    """Saved inside a validation: its loop shall start again from its first batch."""
    progress = fit_loop["epoch_loop.val_loop.batch_progress"]
    for part in ("total", "current"):
        progress[part].update(ready=1, started=1, processed=0, completed=0)
    progress["is_last_batch"] = False


def reopen_epoch(fit_loop: dict[str, Any]) -> None:
    """Saved where an epoch was cut short: Lightning counts it as done, and it is not."""
    for part in ("total", "current"):
        fit_loop["epoch_progress"][part]["processed"] -= 1


def recount_batches(progress: dict[str, Any], consumed: int, samples_per_batch: int) -> None:
    """Lightning counts batches; when they hold another number of samples, they are other batches.

    Rounded up, so that the rest of the epoch never needs more samples than it has.
    """
    done = math.ceil(consumed / samples_per_batch)
    current, total = progress["current"], progress["total"]
    # The checkpoint was written inside on_train_batch_end, one before `completed`.
    open_batches = current["processed"] - current["completed"]
    shift = done - current["processed"]
    for part in (current, total):
        for name in ("ready", "started", "processed"):
            part[name] += shift
        part["completed"] = part["processed"] - open_batches


def rng_state() -> dict[str, Any]:
    """This rank's generators, in types that load with weights_only."""
    numpy: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = numpy
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }


def restore_rng(states: list[dict[str, Any]], seed: int, rank: int) -> None:
    """Each rank's own state at the same world size; else fresh ones from seed and rank."""
    from lightning.pytorch import seed_everything

    if len(states) != cluster.world_size():
        seed_everything(seed + 1000 * rank, verbose=False)
        return
    state = states[rank]
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
