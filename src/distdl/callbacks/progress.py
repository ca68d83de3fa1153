"""What a person sees while it trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich import console, progress

from distdl.callbacks.metrics import StepMetrics
from distdl.data.images import default_workers

log = logging.getLogger(__name__)

DATA_WAIT_LIMIT = 0.1


class Progress(Callback):
    """img/s, data_wait, loss, lr, memory and what the module logs with `prog_bar=True`, at every
    log step. Beside a progress bar of Lightning's it says nothing.

    Args:
        bar: True or False; None: a bar when the output is a terminal.
        refresh_seconds: How often the bar is redrawn at most.
    """

    def __init__(self, bar: bool | None = None, refresh_seconds: float = 0.2) -> None:
        self.bar, self.refresh_seconds = bar, refresh_seconds
        self._console = console.Console(stderr=True)
        self._progress: progress.Progress | None = None
        self._drawn = 0.0
        self._hinted = False
        self._hot = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.progress_bar_callback is not None:  # also one of the module's own
            trainer.callbacks = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StepMetrics) and self not in callback.listeners:
                callback.listeners.append(self)

    @functools.cached_property  # rich looks at a dozen variables, and this is asked at every step
    def _draws(self) -> bool:
        return self._console.is_terminal if self.bar is None else self.bar

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self._draws:
            self._open(f"epoch {trainer.current_epoch + 1}", trainer.num_training_batches)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._draws and trainer.is_global_zero:
            now = time.monotonic()
            done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            if now - self._drawn >= self.refresh_seconds or done == trainer.num_training_batches:
                if self._progress is None:  # gone on in the middle of an epoch
                    self.on_train_epoch_start(trainer, trainer.lightning_module)
                self._drawn = now
                assert self._progress is not None
                self._progress.update(self._task, completed=done)

    def on_metrics(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """Called by StepMetrics on global rank 0."""
        text = describe(metrics, logged_by(trainer, "train/loss" in metrics))
        if self._progress is not None:
            self._progress.update(self._task, info=text)
        elif not self._draws:
            batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            total = trainer.num_training_batches
            log.info(
                "epoch %d  step %d  batch %d/%s  %s",
                trainer.current_epoch + 1,
                step,
                batch,
                total,
                text,
            )
        # The first batches of an epoch always wait; three logs in a row are a habit.
        self._hot = self._hot + 1 if metrics.get("perf/data_wait", 0) > DATA_WAIT_LIMIT else 0
        if self._hot >= 3 and not self._hinted:
            self._hinted = True
            share = 100 * metrics["perf/data_wait"]
            advice = remedy(trainer.datamodule)  # type: ignore[attr-defined]
            log.warning("%.0f %% of the time is spent waiting for data: %s", share, advice)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            values = {
                k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val")
            }
            shown = "  ".join(f"{k} {v:.4g}" for k, v in sorted(values.items()))
            self._close()
            log.info("epoch %d  %s", trainer.current_epoch + 1, shown)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, *args: Any) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _open(self, title: str, total: float) -> None:
        self._close()
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[info]}"),
            console=self._console,
            transient=True,
        )
        finite = total if total != float("inf") else None
        self._task = self._progress.add_task(title, total=finite, info="")
        self._progress.start()

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def remedy(datamodule: Any) -> str:
    """What makes training wait less for its data, by what this run has: the cheapest first."""
    workers, most = getattr(datamodule, "num_workers", None), default_workers()
    if workers is None:
        return f"use more loader workers; this process has CPU cores for {most}"
    if workers < most:
        return f"data.num_workers={most} uses this process's CPU cores (now {workers})"
    says = f"data.num_workers={workers} uses this process's CPU cores already; "
    if not getattr(datamodule, "decodes", False):
        return says + "make a sample cheaper to load"
    return says + (
        "`python -m distdl prepare ... --short-side 256` makes images that load twice as fast "
        "(lossy), data.decoder=nvjpeg decodes on the GPU, `python -m distdl data check` says what "
        "fits"
    )


def logged_by(trainer: Trainer, has_loss: bool) -> dict[str, float]:
    """What the module logs with `prog_bar=True` and, without a loss, each `..._loss` of its own."""
    shown: dict[str, Any] = dict(trainer.progress_bar_metrics)
    if not has_loss:
        shown |= {k: v for k, v in trainer.callback_metrics.items() if "loss" in k.lower()}
    return {k: float(v) for k, v in shown.items() if not k.startswith(("val", "test"))}


def describe(metrics: dict[str, float], logged: dict[str, float] | None = None) -> str:
    """One line: `loss 6.91  lr 0.1  312 img/s  data_wait 1 %  mem 3.2 GiB`; rates that differ are
    all shown, and what the module has `logged`."""
    parts = []
    if "train/loss" in metrics:
        parts.append(f"loss {metrics['train/loss']:.4f}")
    parts += [f"{name} {value:.4g}" for name, value in (logged or {}).items()]
    rates = [f"{v:.4g}" for k, v in metrics.items() if k == "lr" or k.startswith("lr-")]
    if rates:
        parts.append(f"lr {'/'.join(dict.fromkeys(rates))}")
    if "perf/images_per_second" in metrics:
        parts.append(f"{metrics['perf/images_per_second']:,.0f} img/s")
    parts.append(f"data_wait {100 * metrics.get('perf/data_wait', 0):.0f} %")
    parts.append(f"mem {metrics.get('perf/memory_gib', 0):.1f} GiB")
    return "  ".join(parts)
