"""A callback with which a Trainer takes turns (benchmarks.turns)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from benchmarks import turns


class Stops(Callback):
    """`stop_before` in a Trainer. A block ends with all that callbacks and loggers do in it."""

    def __init__(self, first: int, steps: int) -> None:
        self.first = first
        self.steps = steps

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        turns.stop_before(batch_idx, self.first, self.steps)


def overrides(first: int, steps: int) -> list[str]:
    """Overrides with which a run of distdl takes turns."""
    node = {"_target_": "benchmarks.stops.Stops", "first": first, "steps": steps}
    return [f"+callbacks.turns.{key}={value}" for key, value in node.items()]
