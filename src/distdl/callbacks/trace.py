"""Records a timeline of a few training steps on every rank."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile, schedule

log = logging.getLogger(__name__)


class Trace(Callback):
    """Writes `logs/trace-rank<r>.json.gz` for https://ui.perfetto.dev or chrome://tracing.

    The trace shows kernels, collectives (`gloo:all_reduce`, `nccl:all_reduce`) and waiting times.

    Args:
        skip_batches: Number of first batches not to record: they rebuild buckets and fill caches.
        batches: Number of batches to record; each adds megabytes to the trace.
        shapes: Whether to record the shapes of inputs too, which makes the trace larger.
    """

    def __init__(self, skip_batches: int = 5, batches: int = 3, shapes: bool = False) -> None:
        self.skip_batches = skip_batches
        self.batches = batches
        self.shapes = shapes
        self._profile: profile | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        path = Path(trainer.default_root_dir) / "logs" / f"trace-rank{trainer.global_rank}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)

        def write(finished: profile) -> None:
            finished.export_chrome_trace(str(path))
            if trainer.is_global_zero:
                log.info("trace: %s (open it at https://ui.perfetto.dev)", path)

        skip = max(0, self.skip_batches - 1)  # the profiler's warm-up batch counts as skipped
        self._profile = profile(
            activities=activities,
            schedule=schedule(skip_first=skip, wait=0, warmup=1, active=self.batches, repeat=1),
            on_trace_ready=write,
            record_shapes=self.shapes,
        )
        self._profile.start()

    def on_train_batch_end(self, *args: object) -> None:
        if self._profile is not None:
            self._profile.step()

    def on_train_end(self, *args: object, **options: object) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    on_exception = on_train_end
