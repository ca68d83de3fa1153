"""What a checkpoint needs so that Lightning (2.6) goes on from it exactly, and it does not keep."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch

from distdl import cluster


def restart_validation(fit_loop: dict[str, Any]) -> None:
    """Saved inside a validation: its loop shall start again from its first batch."""
    progress = fit_loop["epoch_loop.val_loop.batch_progress"]
    for part in ("total", "current"):
        progress[part].update(ready=1, started=1, processed=0, completed=0)
    progress["is_last_batch"] = False


def reopen_epoch(fit_loop: dict[str, Any]) -> None:
    """Saved where an epoch was cut short: Lightning counts it as done, and it is not."""
    for part in ("total", "current"):
        fit_loop["epoch_progress"][part]["processed"] -= 1


def recount_batches(progress: dict[str, Any], consumed: int, samples_per_batch: int) -> None:
    """Lightning counts batches; when they hold another number of samples, they are other batches.

    Rounded up, so that the rest of the epoch never needs more samples than it has.
    """
    done = math.ceil(consumed / samples_per_batch)
    current, total = progress["current"], progress["total"]
    # The checkpoint was written inside on_train_batch_end, one before `completed`.
    open_batches = current["processed"] - current["completed"]
    shift = done - current["processed"]
    for part in (current, total):
        for name in ("ready", "started", "processed"):
            part[name] += shift
        part["completed"] = part["processed"] - open_batches


def rng_state() -> dict[str, Any]:
    """This rank's generators, in types that load with weights_only."""
    numpy: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = numpy
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }


def restore_rng(states: list[dict[str, Any]], seed: int, rank: int) -> None:
    """Each rank's own state at the same world size; else fresh ones from seed and rank."""
    from lightning.pytorch import seed_everything

    if len(states) != cluster.world_size():
        seed_everything(seed + 1000 * rank, verbose=False)
        return
    state = states[rank]
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
