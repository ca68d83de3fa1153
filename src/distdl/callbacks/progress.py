"""Progress output of a training: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from rich import console

from distdl.callbacks.lean import LeanCallback
from distdl.callbacks.metrics import StepMetrics
from distdl.config.recipe import unit_of
from distdl.data.images import default_workers
from distdl.loops.validation import ValidationLoop
from distdl.util.progress_bar import Line

log = logging.getLogger(__name__)

DATA_WAIT_LIMIT = 0.1
HINT_AFTER = 10.0  # seconds; before, workers start and files are read for the first time


class Progress(LeanCallback):
    """Shows speed, data_wait, loss, lr, memory and the module's `prog_bar=True` values at every log
    step. If the Trainer has a Lightning progress bar, this callback removes itself.

    Args:
        bar: Whether to draw a bar instead of lines; None for a bar if the output is a terminal.
        refresh_seconds: The shortest time between two redraws.
    """

    def __init__(self, bar: bool | None = None, refresh_seconds: float = 0.2) -> None:
        self.bar = bar
        self.refresh_seconds = refresh_seconds
        self._console = console.Console(stderr=True)
        self._line: Line | None = None
        self._drawn = self._began = 0.0
        self._hinted = False
        self._slow_logs = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.progress_bar_callback is not None:  # may come from the module
            trainer.callbacks = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StepMetrics) and self not in callback.listeners:
                callback.listeners.append(self)

    @functools.cached_property  # every step asks, and rich reads a dozen variables
    def _draws(self) -> bool:
        return self._console.is_terminal if self.bar is None else self.bar

    def on_train_start(self, *args: object) -> None:
        self._began = time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        of = f"/{trainer.max_epochs}" if (trainer.max_epochs or 0) > 0 else ""
        self._open(trainer, f"epoch {trainer.current_epoch + 1}{of}", trainer.num_training_batches)

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if self._draws and trainer.is_global_zero:
            now = time.monotonic()
            done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            if now - self._drawn >= self.refresh_seconds or done == trainer.num_training_batches:
                if self._line is None:  # resumed inside an epoch, or after a debugger
                    self.on_train_epoch_start(trainer, trainer.lightning_module)
                self._drawn = now
                assert self._line is not None
                self._line.update(self._line.task_ids[0], completed=done)

    def on_metrics(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """Called by StepMetrics on global rank 0."""
        logged = logged_by(trainer, "train/loss" in metrics)
        parts = described(metrics, logged, unit_of(type(trainer.datamodule).__module__))  # type: ignore[attr-defined]
        if self._line is not None:
            self._line.update(self._line.task_ids[0], info=parts)
        elif not self._draws:
            batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            count = f"{batch}/{trainer.num_training_batches}"
            epoch = trainer.current_epoch + 1
            log.info("epoch %d  step %d  batch %s  %s", epoch, step, count, "  ".join(parts))
        # The first batches of an epoch always wait, so warn only after three such logs in a row.
        self._slow_logs = (
            self._slow_logs + 1 if metrics.get("perf/data_wait", 0) > DATA_WAIT_LIMIT else 0
        )
        settled = time.monotonic() - self._began >= HINT_AFTER
        if self._slow_logs >= 3 and settled and not self._hinted:
            self._hinted = True
            share = 100 * metrics["perf/data_wait"]
            advice = remedy(trainer.datamodule)  # type: ignore[attr-defined]
            log.warning("%.0f %% of the time is spent waiting for data: %s", share, advice)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(trainer, "validate", sum(trainer.num_val_batches))

    def on_validation_batch_end(self, *args: object, **options: object) -> None:
        if self._line is not None:
            self._line.advance(self._line.task_ids[-1])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._line is not None and len(self._line.task_ids) > 1:  # the epoch may continue
            self._line.remove_task(self._line.task_ids[-1])
        else:
            self._close()
        loop = trainer.fit_loop.epoch_loop.val_loop
        cut = isinstance(loop, ValidationLoop) and loop.was_cut  # without a result
        if trainer.is_global_zero and not trainer.sanity_checking and not cut:
            logged = sorted(trainer.callback_metrics.items())
            shown = "  ".join(f"{k} {float(v):.4g}" for k, v in logged if k.startswith("val"))
            log.info("epoch %d  %s", trainer.current_epoch + 1, shown)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(trainer, "test", sum(trainer.num_test_batches))

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(trainer, "predict", sum(trainer.num_predict_batches))

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _open(self, trainer: Trainer, title: str, total: float) -> None:
        """Adds a task to the bar: an epoch, or a validation below it."""
        if not (self._draws and trainer.is_global_zero):
            return
        if self._line is None:
            self._line = Line(self._console)
            self._line.start()
            DRAWN.add(self)
            _listen()
        self._line.add_task(title, total=None if math.isinf(total) else total)

    def _close(self, *args: object, **options: object) -> None:
        line = self._line
        self._line = None
        DRAWN.discard(self)
        if line is not None:
            line.stop()

    on_train_epoch_end = on_exception = teardown = _close


# Bars on the screen. They are removed when the user's code starts a debugger or calls input(), and
# drawn again at the next batch.
DRAWN: set[Progress] = set()
ASKS = ("builtins.breakpoint", "builtins.input", "sys.settrace")


@functools.cache  # once: Python cannot remove an audit hook
def _listen() -> None:
    def hear(event: str, args: tuple[object, ...]) -> None:
        if event in ASKS:
            for bar in list(DRAWN):
                bar._close()

    sys.addaudithook(hear)


def remedy(datamodule: object) -> str:
    """Advice for a run that waits for its data: the cheapest measure first."""
    workers = getattr(datamodule, "num_workers", None)
    most = default_workers()
    if workers is None and "num_workers" in inspect.signature(type(datamodule).__init__).parameters:
        workers = getattr(datamodule, "hparams", {}).get("num_workers")
        if workers is None:
            return f"data.num_workers={most} uses this process's CPU cores"
    cheaper = "make a sample cheaper to load"
    if workers is None:
        more_workers = f"num_workers={most} of its DataLoader uses this process's CPU cores"
        return f"{more_workers}; beyond that, {cheaper}"
    if workers < most:
        return f"data.num_workers={most} uses this process's CPU cores (now {workers})"
    used = f"data.num_workers={workers} already uses this process's CPU cores; "
    if not getattr(datamodule, "decodes", False):
        return used + cheaper
    return used + (
        "`python -m distdl prepare ... --short-side 256` makes images that load twice as fast "
        "(lossy), data.decoder=nvjpeg decodes on the GPU; `python -m distdl data check` shows the "
        "gain"
    )


def logged_by(trainer: Trainer, has_loss: bool) -> dict[str, float]:
    """The module's `prog_bar=True` metrics. Unless `has_loss`, also all named like a loss."""
    shown: dict[str, Any] = dict(trainer.progress_bar_metrics)
    if not has_loss:
        shown |= {k: v for k, v in trainer.callback_metrics.items() if "loss" in k.lower()}
    return {k: float(v) for k, v in shown.items() if not k.startswith(("val", "test"))}


def described(
    metrics: dict[str, float], logged: dict[str, float] | None = None, unit: str = "samples/s"
) -> list[str]:
    """The parts of a log line: `loss 6.91`, `logged`, `lr 0.1` (all different rates), `312 img/s`,
    `data_wait 1 %`, `mem 3.2 GiB`."""
    parts = [f"loss {metrics['train/loss']:.4f}"] if "train/loss" in metrics else []
    parts += [f"{name} {value:.4g}" for name, value in (logged or {}).items()]
    rates = [f"{v:.4g}" for k, v in metrics.items() if k == "lr" or k.startswith("lr-")]
    if rates:
        parts.append(f"lr {'/'.join(dict.fromkeys(rates))}")
    if "perf/images_per_second" in metrics:
        parts.append(f"{metrics['perf/images_per_second']:,.0f} {unit}")
    wait, memory = (metrics.get(f"perf/{name}", 0) for name in ("data_wait", "memory_gib"))
    return [*parts, f"data_wait {100 * wait:.0f} %", f"mem {memory:.1f} GiB"]
