"""Records the samples of each step in a CSV file per rank, to prove coverage or find bad data."""

from __future__ import annotations

import time
from pathlib import Path
from typing import IO, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT


class RecordSamples(Callback):
    """Appends `attempt,epoch,step,ids` to `logs/samples-rank<r>.csv` (ids separated by spaces).

    `step` counts batches over all epochs, from 1. Batches must be dicts with an `index`, as in
    distdl's data modules, or come from loaders whose samples distdl chooses.

    Args:
        unknown: Whether to train on with a line without ids if these are unknown.
        step_seconds: The shortest time of a step.

    Raises:
        TypeError: The ids are unknown.
    """

    def __init__(self, unknown: bool = False, step_seconds: float = 0.0) -> None:
        self.unknown = unknown
        self.step_seconds = step_seconds
        self.run_dir: Path | None = None  # set by build
        self.attempt = 0
        self._file: IO[str] | None = None
        self._ended = 0.0

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
    ) -> None:
        sampler: Any = getattr(trainer.train_dataloader, "batch_sampler", None)
        if isinstance(batch, dict) and "index" in batch:
            samples = batch["index"].tolist()
        elif hasattr(sampler, "current"):
            samples = sampler.current()
        elif self.unknown:
            samples = []
        else:
            raise TypeError("callbacks.record_samples needs batches that are dicts with an 'index'")
        if self._file is None:
            assert self.run_dir is not None
            path = self.run_dir / "logs" / f"samples-rank{trainer.global_rank}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1)
        step = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        ids = " ".join(map(str, samples))
        self._file.write(f"{self.attempt},{trainer.current_epoch},{step},{ids}\n")
        time.sleep(max(0.0, self._ended + self.step_seconds - time.monotonic()))
        self._ended = time.monotonic()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
