"""Validates or tests a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distdl.runs import checkpoints
from distdl.worker.build import Built
from distdl.worker.initial_state import start
from distdl.worker.task import Metrics, Task


class Validate(Task[Built]):
    """Runs the validation loop once, and logs the metrics at the checkpoint's step and epoch.

    In a run that has trained, the metrics are called `validate/...`, so that no point is added to
    the training's curves.

    Args:
        checkpoint: "best" or "last" of this run, a file, a run directory, or "none" for the weights
            with which the model starts. `run` raises a UserError if there is no such checkpoint.
    """

    evaluates = True
    calls = ("validation_step", "val_dataloader")

    def __init__(self, checkpoint: str = "best") -> None:
        self.checkpoint = checkpoint

    def run(self, context: Built) -> Metrics:
        return _evaluate(context, self.checkpoint, context.trainer.validate)


class Test(Task[Built]):
    """Runs the test loop in the same way. A run that has trained logs `test/...`.

    Args:
        checkpoint: As of `Validate`.
    """

    evaluates = True
    calls = ("test_step", "test_dataloader")

    def __init__(self, checkpoint: str = "best") -> None:
        self.checkpoint = checkpoint

    def run(self, context: Built) -> Metrics:
        return _evaluate(context, self.checkpoint, context.trainer.test)


def checkpoint_of(context: Built, checkpoint: str) -> str | None:
    """The path of a task's checkpoint; None for "none"."""
    if checkpoint == "none":
        return None
    return str(checkpoints.find(checkpoint, "task.checkpoint", context.run.checkpoints))


def _evaluate(
    context: Built, checkpoint: str, loop: Callable[..., list[Mapping[str, float]]]
) -> Metrics:
    path = checkpoint_of(context, checkpoint)
    results = start(context, path, loop, verbose=False)
    return {k: float(v) for result in results for k, v in result.items()}
