"""Measures the loss and the speed of training without a device sync between two log steps.

Lightning's `self.log` takes about a quarter of a millisecond per call and step. Here a step takes
two clock reads and one addition on the device. Every `trainer.log_every_n_steps` optimizer steps
the sums are read once, averaged over the ranks and passed to the loggers.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.distributed.tensor import DTensor

from distdl.callbacks.lean import LeanCallback
from distdl.data.sampling import TrainPosition
from distdl.data.side_stream import QueueLimit
from distdl.loops.fit import fit_loop_of
from distdl.optim.learning_rates import LAYER
from distdl.runs.directory import Attempt

log = logging.getLogger(__name__)


class StepMetrics(LeanCallback):
    """Logs `train/loss`, `lr`, `perf/images_per_second`, `perf/data_wait`, `perf/memory_gib`.

    The loss is what `training_step` returns, averaged since the last log and over all ranks. See
    `rates` for the names of several learning rates. Images per second count all ranks. `data_wait`
    is the share of the time in which steps waited for their batch (0 to 1). `data/damaged`, at the
    end of an epoch, is the number of images that could not be decoded.

    Args:
        batch_size: Samples per device and batch; None for the first dimension of a batch's tensors.
        attempt: Global rank 0 updates its status.json, at most every five seconds.
        position: Once the loaders exist, its samples per batch are used instead of `batch_size`.
        on_start: Called on global rank 0 when training starts and the loaders are known.
        on_failure: Called first of all when an exception ends the loop.
    """

    def __init__(
        self,
        batch_size: int | None,
        attempt: Attempt | None = None,
        position: TrainPosition | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.attempt = attempt
        self.position = position
        self.on_start: Callable[[], None] | None = None
        self.on_failure: Callable[[BaseException], object] | None = None
        self.latest: dict[str, float] = {}
        self.listeners: list[Any] = []
        self.images_per_second: list[float] = []
        self.has_trained = False  # whether a batch has ended
        self._status_at = 0.0
        self._warned = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loss = torch.zeros((), device=pl_module.device)
        self._queue_limit = QueueLimit(pl_module.device)
        self._logged_step = steps_of(trainer)
        if self.on_start is not None and trainer.is_global_zero:
            self.on_start()
        self._reset()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batch_end = time.perf_counter()

    on_validation_end = on_train_epoch_start  # a validation does not count as time of a step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._wait += time.perf_counter() - self._batch_end

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
    ) -> None:
        loss = returned_loss(trainer, outputs)
        if loss is not None:
            self._loss += loss
            self._losses += 1
        self._batches += 1
        self.has_trained = True
        self._queue_limit.step()
        now = time.perf_counter()
        self._seconds += now - self._batch_end
        self._batch_end = now
        step = steps_of(trainer)
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step % every == 0 and step != self._logged_step:
            if self.batch_size is None:
                self.batch_size = batch_size_of(batch)
            self._log(trainer, step)
            self._logged_step = step
            self._reset()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (damage := getattr(trainer.datamodule, "damage", None)) is None:  # type: ignore[attr-defined]
            return
        # The stages of a pipeline read the same images: count each image once.
        shares = trainer.distributed_sampler_kwargs or {}
        alike = trainer.world_size // shares.get("num_replicas", 1)
        count = torch.tensor(damage.in_epoch / alike, device=pl_module.device)
        damage.in_epoch = 0
        damaged = round(float(trainer.strategy.reduce(count, reduce_op="sum")))
        if not damaged or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.log_metrics({"data/damaged": float(damaged)}, trainer.global_step)
        text = "epoch %d: %d damaged images were left out; logs/damaged-rank*.txt lists them"
        log.warning(text, trainer.current_epoch + 1, damaged)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self.on_failure is not None and not isinstance(exception, KeyboardInterrupt):
            self.on_failure(exception)
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.attempt is not None and trainer.is_global_zero:
            self.attempt.update(step=steps_of(trainer), epoch=trainer.current_epoch)

    def _log(self, trainer: Trainer, step: int) -> None:
        metrics: dict[str, float] = {}
        # By the ranks that have a loss, as a step of manual optimization may return none. All ranks
        # reduce: one that does not would leave the others waiting.
        has_loss = torch.full_like(self._loss, float(self._losses > 0))
        mine = torch.stack([self._loss / max(self._losses, 1), has_loss])
        total, share = trainer.strategy.reduce(mine).tolist()
        if share:
            metrics["train/loss"] = total / share
            # Reading the loss waits for the steps that the GPU has queued: count their time too.
            now = time.perf_counter()
            self._seconds += now - self._batch_end
            self._batch_end = now
        metrics |= rates(trainer.optimizers)
        if self.batch_size and self._seconds > 0:
            # The stages of a pipeline work on the same images: count them once.
            shares = trainer.distributed_sampler_kwargs or {}
            samples = self.batch_size * shares.get("num_replicas", 1)
            if self.position is not None and self.position.samples:
                samples = self.position.samples
            images = self._batches * samples
            metrics["perf/images_per_second"] = images / self._seconds
            self.images_per_second.append(images / self._seconds)
        metrics["perf/data_wait"] = self._wait / max(self._seconds, 1e-9)
        metrics["perf/memory_gib"] = memory_gib(trainer.strategy.root_device)
        metrics["epoch"] = float(trainer.current_epoch)
        self.latest = metrics
        if not trainer.is_global_zero:
            return
        loss = metrics.get("train/loss", 0.0)
        if not math.isfinite(loss) and not self._warned:
            self._warned = True
            log.warning(
                "the loss is %s since step %d at the latest (checked every %d steps): a lower "
                "learning rate may help; trainer.detect_anomaly=true names the operation",
                loss,
                step,
                trainer.log_every_n_steps,  # type: ignore[attr-defined]
            )
        # The module's own train/loss takes precedence, even if it is logged at the epoch's end.
        logged = {*trainer.callback_metrics, *fit_loop_of(trainer).epoch_loop.logged_names}
        for logger in trainer.loggers:
            logger.log_metrics({k: v for k, v in metrics.items() if k not in logged}, step)
        for listener in self.listeners:
            listener.on_metrics(trainer, step, metrics)
        now = time.monotonic()
        if self.attempt is not None and now - self._status_at > 5:
            self._status_at = now
            self.attempt.update(step=step, epoch=trainer.current_epoch)

    def _reset(self) -> None:
        self._loss.zero_()
        self._losses = self._batches = 0
        self._wait = self._seconds = 0.0
        self._batch_end = time.perf_counter()


def steps_of(trainer: Trainer) -> int:
    """The step number in logs, metrics and checkpoints: the number of optimizer steps so far. With
    manual optimization a batch may take several steps or none; the number of batches is used."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def returned_loss(trainer: Trainer, outputs: STEP_OUTPUT) -> torch.Tensor | None:
    """The loss that `training_step` returned, without dimensions; None if it returned none.

    Args:
        outputs: What Lightning passes to `on_train_batch_end`. Its loss is divided by the number of
            batches per optimizer step, unless the module optimises by hand. A loss with dimensions
            counts as the mean of its values. One that is spread over ranks (a DTensor, of
            tensor parallelism) is gathered: all ranks of its mesh must call this.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if loss is None:
        return None
    loss = loss.detach()
    if loss.ndim:
        loss = loss.float().mean()
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    parts = trainer.accumulate_grad_batches  # of this epoch: GradientAccumulationScheduler sets it
    if parts == 1 or not trainer.lightning_module.automatic_optimization:
        return loss
    return loss.float() * parts


def rates(optimizers: list[Any]) -> dict[str, float]:
    """The learning rates by name. `lr` is that of the first optimizer's first group. If groups may
    differ (those of a config's optimizer do not), each also gets the name that Lightning's
    LearningRateMonitor uses: `lr-Adam`, `lr-SGD/pg1`, `lr-SGD-1`. Those of layers with a rate of
    their own (`optimizer.layer_decay`) are `lr-SGD/layer4.1`."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    named = {"lr": float(groups[0]["lr"])} if groups else {}
    one = len(groups) < 2 or all("reference_lr" in group and LAYER not in group for group in groups)
    seen = Counter[str]()
    for optimizer in () if one else optimizers:
        name = kind = f"lr-{type(optimizer).__name__}"
        if seen[kind]:
            name = f"{kind}-{seen[kind]}"
        seen[kind] += 1
        for number, group in enumerate(optimizer.param_groups, 1):
            label = f"pg{number}" if len(optimizer.param_groups) > 1 else ""
            label = group.get("name", group.get(LAYER, label))
            named[f"{name}/{label}" if label else name] = float(group["lr"])
    return named


def batch_size_of(batch: object) -> int | None:
    """The first dimension of the first tensor in a nested batch."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((n for n in map(batch_size_of, batch) if n), None)
    return None


def memory_gib(device: torch.device) -> float:
    """The GPU's peak memory; on the CPU, this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30
