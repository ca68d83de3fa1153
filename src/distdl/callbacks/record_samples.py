"""Records the samples of each step in a CSV file per rank, to prove coverage or find bad data."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from lightning.pytorch import Callback, LightningModule, Trainer


class RecordSamples(Callback):
    """Appends `attempt,epoch,step,ids` to `logs/samples-rank<r>.csv` (ids separated by spaces).

    `step` counts batches over all epochs, from 1. Batches must be dicts with an `index`, as in
    distdl's data modules.
    """

    def __init__(self) -> None:
        self.run_dir: Path | None = None  # set by build
        self.attempt = 0
        self._file: IO[str] | None = None

    def ids(self, trainer: Trainer, batch: Any) -> list[Any]:
        """The samples of a batch."""
        if not isinstance(batch, dict) or "index" not in batch:
            raise TypeError("callbacks.record_samples needs batches that are dicts with an 'index'")
        return list(batch["index"].tolist())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ids = " ".join(map(str, self.ids(trainer, batch)))
        if self._file is None:
            assert self.run_dir is not None
            path = self.run_dir / "logs" / f"samples-rank{trainer.global_rank}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1)
        step = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self._file.write(f"{self.attempt},{trainer.current_epoch},{step},{ids}\n")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
