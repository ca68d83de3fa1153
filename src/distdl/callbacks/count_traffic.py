"""Counts the bytes that a training step sends, on every rank and under any strategy."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from distdl.distributed import process_group
from distdl.distributed.traffic import Traffic, in_words

log = logging.getLogger(__name__)


class CountTraffic(Callback):
    """Counts the bytes sent in training steps, but not in validations and checkpoints. Logs them at
    the end and writes `logs/traffic.json`. Counting slows the steps down.

    Args:
        skip_steps: Number of first optimizer steps not to count: DDP rebuilds its buckets in them.
    """

    def __init__(self, skip_steps: int = 2) -> None:
        self.skip_steps = skip_steps
        self.traffic = Traffic()
        self.steps = 0
        self._first_step = 0
        self._counting = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step + self.skip_steps

    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step >= self._first_step:
            self._counting.enter_context(self.traffic.counted())

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        self._counting.close()
        self.steps = max(0, trainer.global_step - self._first_step)

    def on_exception(self, *args: object) -> None:
        self._counting.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        every_rank = process_group.gather(self.per_step())
        if not trainer.is_global_zero or not self.steps:
            return
        most = max(every_rank, key=lambda rank: rank["sent"])
        parts = "  ".join(
            f"{name} {tally['calls']:g} x, {in_words(tally['sent'])}"
            for name, tally in most["collectives"].items()
        )
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        sent = in_words(most["sent"])
        log.info("traffic: a rank sends %s per step (%s counted)  %s", sent, steps, parts)
        path = Path(trainer.default_root_dir) / "logs" / "traffic.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"steps": self.steps, "ranks": every_rank}, indent=1))

    def per_step(self) -> dict[str, Any]:
        """This rank's bytes and calls per optimizer step."""
        steps = self.steps or 1
        tallies = self.traffic.collectives.items()
        each = {name: {k: v / steps for k, v in vars(tally).items()} for name, tally in tallies}
        sent, payload = self.traffic.sent / steps, self.traffic.payload / steps
        return {"payload": payload, "sent": sent, "collectives": each}
