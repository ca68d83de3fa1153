"""Keeps what a user's callbacks save apart from distdl's own checkpoints.

Names like `last.ckpt` and `epoch_003.ckpt` are common to both, and a ModelCheckpoint deletes what
it has written: in one folder each would write over the other's files and delete them.
"""

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
    """Moves every Checkpoint callback that would write into `ours`, or names no folder, next to it.

    Args:
        trainer: Before its callbacks restore their state, which counts for its own folder alone.
        ours: RUN/checkpoints.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, Checkpoint) or not hasattr(callback, "dirpath"):
            continue
        dirpath: Any = callback.dirpath
        if dirpath is None:
            callback.dirpath = str(ours.parent / FOLDER)
        elif (inside := below(dirpath, ours)) is not None:
            callback.dirpath = str(ours.parent / FOLDER / inside)
            name = type(callback).__name__
            log.warning("%s writes into %s: %s is distdl's", name, callback.dirpath, ours)


def refuse_ours(trainer: Trainer, ours: Path) -> None:
    """Makes `trainer.save_checkpoint` refuse what lies in `ours`: a callback of any kind calls it.

    The refusal is a UserError.
    """
    save = trainer.save_checkpoint

    def save_checkpoint(filepath: Any, *args: Any, **options: Any) -> None:
        if below(filepath, ours) is not None:
            what = f"{filepath} lies in {ours}, where distdl writes and deletes its own checkpoints"
            raise UserError.at("callbacks", what, f"save into {ours.parent / FOLDER}")
        save(filepath, *args, **options)

    trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]


def save_swa(trainer: Trainer, run: Path) -> None:
    """What SWA has averaged becomes the model's weights when the training ends, after the last of
    our checkpoints: a file of their own. Collective."""
    averages = [c for c in trainer.callbacks if isinstance(c, StochasticWeightAveraging)]  # type: ignore[attr-defined]
    # Not where the training was stopped before.
    if any(c.n_averaged is not None and trainer.current_epoch > c.swa_end for c in averages):
        path = run / FOLDER / f"swa_epoch_{trainer.current_epoch:03d}.ckpt"
        trainer.save_checkpoint(path)
        log.info("the averaged weights: %s", path)


def below(path: Any, folder: Path) -> Path | None:
    """Where `path` lies inside `folder`, through whatever links; None: elsewhere."""
    if "://" in str(path):
        return None
    real, top = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    return real.relative_to(top) if real.is_relative_to(top) else None
