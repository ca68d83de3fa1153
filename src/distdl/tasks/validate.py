"""Validate a checkpoint."""

from __future__ import annotations

from distdl import checkpoint as checkpoints
from distdl.build import Built
from distdl.errors import Problem, UserError


def validate(context: Built, checkpoint: str = "best") -> dict[str, float]:
    """Runs the validation loop once.

    Args:
        context: The built run.
        checkpoint: "best" or "last" of this run, a file, a run directory, or "none" for the
            weights the model starts with.

    Raises:
        UserError: There is no such checkpoint.
    """
    path = None if checkpoint == "none" else _find(context, checkpoint)
    results = context.trainer.validate(
        context.module,
        datamodule=context.datamodule,
        ckpt_path=path,
        weights_only=True if path else None,
        verbose=False,
    )
    return {k: float(v) for result in results for k, v in result.items()}


def _find(context: Built, named: str) -> str:
    if named not in ("best", "last"):
        return str(checkpoints.find(named))
    path = context.store.folder / f"{named}.ckpt"
    if not path.exists():
        raise UserError(
            Problem(
                "task.checkpoint",
                f"this run has no {named}.ckpt",
                "name the run that has one (name=...), a .ckpt file, or a run directory",
            )
        )
    return str(checkpoints.find(path))
