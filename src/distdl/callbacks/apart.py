"""Keeps the checkpoints of a user's callbacks apart from distdl's own: in one folder, each would
overwrite and delete the other's `last.ckpt` and `epoch_003.ckpt`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, StochasticWeightAveraging

from distdl.util.errors import UserError

log = logging.getLogger(__name__)

FOLDER = "model_checkpoints"  # of a run


def give_own_folders(trainer: Trainer, ours: Path) -> None:
    """Redirects Checkpoint callbacks with no folder, or one inside `ours` (RUN/checkpoints), to a
    folder beside it; before they restore their state: ModelCheckpoint ignores the state of another
    folder."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, Checkpoint) or not hasattr(callback, "dirpath"):
            continue
        if callback.dirpath is None:
            callback.dirpath = str(ours.parent / FOLDER)
        elif (inside := below(callback.dirpath, ours)) is not None:
            callback.dirpath = str(ours.parent / FOLDER / inside)
            name = type(callback).__name__
            log.warning("%s writes into %s: %s is distdl's", name, callback.dirpath, ours)


def refuse_ours(trainer: Trainer, ours: Path) -> None:
    """Makes `trainer.save_checkpoint`, with which callbacks of every kind save, raise a UserError
    for paths in `ours`."""
    save = trainer.save_checkpoint

    def save_checkpoint(filepath: Any, *args: Any, **options: Any) -> None:
        if below(filepath, ours) is not None:
            what = f"{filepath} lies in {ours}, where distdl writes and deletes its own checkpoints"
            raise UserError.at("callbacks", what, f"save into {ours.parent / FOLDER}")
        save(filepath, *args, **options)

    trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]


def save_swa(trainer: Trainer, run: Path) -> None:
    """Saves SWA's averaged weights in a file of their own: SWA puts them into the model when the
    training ends, after our last checkpoint. Collective."""
    averages = [c for c in trainer.callbacks if isinstance(c, StochasticWeightAveraging)]  # type: ignore[attr-defined]
    # Not if the training stopped before SWA's last epoch.
    if any(c.n_averaged is not None and trainer.current_epoch > c.swa_end for c in averages):
        path = run / FOLDER / f"swa_epoch_{trainer.current_epoch:03d}.ckpt"
        trainer.save_checkpoint(path)
        log.info("the averaged weights: %s", path)


def below(path: Any, folder: Path) -> Path | None:
    """`path` relative to `folder`, with links resolved; None: it is outside."""
    if "://" in str(path):
        return None
    real, top = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    return real.relative_to(top) if real.is_relative_to(top) else None
