"""What `distdl drill` adds to a run: a record of its samples, and time for a fault."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from distdl.callbacks.record_samples import RecordSamples


class DrillRecorder(RecordSamples):
    """Records samples, also where batches are no dicts with an `index`, by the sampler's position.

    Args:
        step_seconds: The shortest time of a step.
    """

    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self.step_seconds, self._ended = step_seconds, 0.0

    def ids(self, trainer: Trainer, batch: Any) -> list[Any]:
        if isinstance(batch, dict) and "index" in batch:
            return super().ids(trainer, batch)
        sampler: Any = getattr(trainer.train_dataloader, "batch_sampler", None)
        return list(sampler.current()) if hasattr(sampler, "current") else []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        time.sleep(max(0.0, self._ended + self.step_seconds - time.monotonic()))
        self._ended = time.monotonic()
