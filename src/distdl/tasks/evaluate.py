"""Validates or tests a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning.pytorch.loggers import Logger

from distdl.runs import checkpoints
from distdl.tasks.needs import needs
from distdl.worker.build import Built
from distdl.worker.initial_state import start


def validate(context: Built, checkpoint: str = "best") -> dict[str, float]:
    """Runs the validation loop once, and logs the metrics at the checkpoint's step and epoch.

    In a run that has trained, the metrics are called `validate/...`, so that no point is added to
    the training's curves.

    Args:
        checkpoint: "best" or "last" of this run, a file, a run directory, or "none" for the weights
            with which the model starts. A UserError if there is no such checkpoint.
    """
    return _evaluate(context, checkpoint, context.trainer.validate)


def test(context: Built, checkpoint: str = "best") -> dict[str, float]:
    """Runs the test loop in the same way. A run that has trained logs `test/...`."""
    return _evaluate(context, checkpoint, context.trainer.test)


# Validation of the config calls these.
validate.check = needs("validation_step", "val_dataloader")  # type: ignore[attr-defined]
test.check = needs("test_step", "test_dataloader")  # type: ignore[attr-defined]


def checkpoint_of(context: Built, checkpoint: str) -> str | None:
    """The path of a task's checkpoint; None for "none"."""
    if checkpoint == "none":
        return None
    return str(checkpoints.find(checkpoint, "task.checkpoint", context.run.checkpoints))


def _evaluate(
    context: Built, checkpoint: str, loop: Callable[..., list[Mapping[str, float]]]
) -> dict[str, float]:
    path = checkpoint_of(context, checkpoint)
    if context.has_trained:
        name_by_task(context.trainer.loggers, loop.__name__)
    results = start(context, path, loop, verbose=False)
    return {k: float(v) for result in results for k, v in result.items()}


def name_by_task(loggers: Iterable[Logger], task: str) -> None:
    """Makes loggers write metrics as `<task>/<name>`."""
    for each in loggers:
        each.log_metrics = functools.partial(_log_as, task, each.log_metrics)  # type: ignore[method-assign]


def _log_as(
    task: str, log: Callable[..., None], metrics: Mapping[str, Any], *args: Any, **options: Any
) -> None:
    # `epoch` is that of the checkpoint, and hp_metric is a placeholder of TensorBoard's logger.
    same = ("epoch", "hp_metric")
    log({k if k in same else f"{task}/{k}": v for k, v in metrics.items()}, *args, **options)
