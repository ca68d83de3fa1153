"""Separates the checkpoints of a user's callbacks from distdl's: in one folder, each would replace
and delete the other's `last.ckpt` and `epoch_003.ckpt`."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, StochasticWeightAveraging

from distdl.util.errors import UserError

log = logging.getLogger(__name__)

FOLDER = "model_checkpoints"  # in the run directory


def separate_folders(trainer: Trainer, ours: Path) -> None:
    """Redirects Checkpoint callbacks without a folder, or with one inside `ours` (RUN/checkpoints),
    to a folder beside it. Call this before they restore their state: ModelCheckpoint ignores the
    state of another folder."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, Checkpoint) or not hasattr(callback, "dirpath"):
            continue
        if callback.dirpath is None:
            callback.dirpath = str(ours.parent / FOLDER)
        elif (inside := below(callback.dirpath, ours)) is not None:
            callback.dirpath = str(ours.parent / FOLDER / inside)
            name = type(callback).__name__
            log.warning(
                "%s writes into %s: only distdl writes into %s", name, callback.dirpath, ours
            )


def refuse_path(path: str | os.PathLike[str], ours: Path) -> None:
    """Raises a UserError for a path in `ours`."""
    if below(path, ours) is not None:
        raise UserError.at(
            "callbacks",
            what=f"{path} is in {ours}, where only distdl writes and deletes checkpoints",
            remedy=f"save into {ours.parent / FOLDER}",
            code="reserved",
        )


def save_swa(trainer: Trainer, run: Path) -> None:
    """Saves SWA's averaged weights in a separate file: SWA copies them into the model at the end of
    training, after our last checkpoint. Collective."""
    averages = [c for c in trainer.callbacks if isinstance(c, StochasticWeightAveraging)]  # type: ignore[attr-defined]
    # SWA makes no average if the training stopped before SWA's last epoch.
    if any(c.n_averaged is not None and trainer.current_epoch > c.swa_end for c in averages):
        path = run / FOLDER / f"swa_epoch_{trainer.current_epoch:03d}.ckpt"
        trainer.save_checkpoint(path)
        log.info("averaged weights: %s", path)


def below(path: str | os.PathLike[str], folder: Path) -> Path | None:
    """`path` relative to `folder`, with links resolved; None if it is outside."""
    if "://" in str(path):
        return None
    real, top = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    return real.relative_to(top) if real.is_relative_to(top) else None
