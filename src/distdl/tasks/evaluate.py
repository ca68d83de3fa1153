"""Validate a checkpoint, or test it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distdl import checkpoint as checkpoints
from distdl.build import Built
from distdl.starting import start_from
from distdl.tasks.needs import needs


def validate(context: Built, checkpoint: str = "best") -> dict[str, float]:
    """Runs the validation loop once, and logs at the checkpoint's step and epoch.

    In a run that has trained the metrics are called `validate/...`, so that no curve of the
    training gets a point that is not its own.

    Args:
        context: The built run.
        checkpoint: "best" or "last" of this run, a file, a run directory, or "none" for the
            weights the model starts with.

    Raises:
        UserError: There is no such checkpoint.
    """
    return _evaluate(context, checkpoint, context.trainer.validate)


def test(context: Built, checkpoint: str = "best") -> dict[str, float]:
    """The same with the test loop; in a run that has trained the metrics are called `test/...`."""
    return _evaluate(context, checkpoint, context.trainer.test)


# Validation asks for it.
validate.check = needs("validation_step", "val_dataloader")  # type: ignore[attr-defined]
test.check = needs("test_step", "test_dataloader")  # type: ignore[attr-defined]


def _evaluate(
    context: Built, checkpoint: str, loop: Callable[..., list[Mapping[str, float]]]
) -> dict[str, float]:
    path = None
    if checkpoint != "none":
        path = str(checkpoints.find(checkpoint, "task.checkpoint", context.store.folder))
        start_from(context, path)
    _log_at_the_checkpoint(context, loop.__name__)
    results = loop(
        context.module,
        datamodule=context.datamodule,
        ckpt_path=path,
        weights_only=not context.trusts_checkpoints if path else None,
        verbose=False,
    )
    return {k: float(v) for result in results for k, v in result.items()}


def _log_at_the_checkpoint(context: Built, task: str) -> None:
    """Lightning would log at step 0 of epoch 0: of a checkpoint it loads the weights alone."""
    loop = context.trainer.fit_loop
    of_module = context.module.on_load_checkpoint

    def on_load_checkpoint(loaded: dict[str, Any]) -> None:
        of_module(loaded)
        loop.epoch_loop._batches_that_stepped = int(loaded.get("global_step") or 0)
        loop.epoch_progress.current.completed = int(loaded.get("epoch") or 0)

    context.module.on_load_checkpoint = on_load_checkpoint  # type: ignore[method-assign, assignment]
    if context.has_trained:
        for logger in context.trainer.loggers:
            logger.log_metrics = _renaming(logger.log_metrics, task)  # type: ignore[method-assign]


def _renaming(log: Callable[..., None], task: str) -> Callable[..., None]:
    def log_metrics(metrics: Mapping[str, Any], step: int | None = None) -> None:
        # The epoch is the checkpoint's, as the training logged it there.
        log({k if k == "epoch" else f"{task}/{k}": v for k, v in metrics.items()}, step)

    return log_metrics
