"""Trains a few steps with growing batches, in a fresh process beside one rank:
`python batch_trial.py`, which `distdl.worker.batch_size` starts.

It reads the modules' folders as a line of JSON and then a `TrialRequest` from its standard input,
and writes a `TrialOutcome` for each batch into a file, until one does not train.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from distdl.job import Resources
    from distdl.ranks.environment import Environment

# A failure for lack of memory that is no OutOfMemoryError: of cuDNN, cuBLAS, NCCL, and of torch
# without its caching allocator.
NO_MEMORY = r"out of memory|_STATUS_ALLOC_FAILED"
STEPS = 2  # optimizer steps: the first one makes the optimizer's state


@dataclass(frozen=True)
class TrialRequest:
    """What to try: the batches of a device, in this order. `outcomes` is the file for them."""

    config: DictConfig
    batches: tuple[int, ...]
    environment: Environment
    resources: Resources
    outcomes: Path
    parent: int


@dataclass(frozen=True)
class TrialOutcome:
    """How a batch trained on a rank: the most memory at once, in bytes of the device; or why it did
    not. `no_memory`: for lack of memory."""

    batch: int
    memory: int = 0
    why: str = ""
    no_memory: bool = False


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # those of the job: the rank ends this process
        signal.signal(number, signal.SIG_IGN)
    sys.path[:] = json.loads(sys.stdin.buffer.readline())
    request: TrialRequest = pickle.load(sys.stdin.buffer)

    from distdl.distributed import process_group
    from distdl.util import lightning_names
    from distdl.util.orphans import die_with_parent

    die_with_parent(request.parent)
    lightning_names.serve()
    request.environment.export()
    for batch in request.batches:
        outcome = tried(request, batch)
        with request.outcomes.open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(outcome)) + "\n")
        if outcome.why:  # others may wait for this rank: they are ended, and so is this process
            os._exit(1)
    process_group.gather(None)  # others may still need this rank to end their last batch
    os._exit(0)


def tried(request: TrialRequest, batch: int) -> TrialOutcome:
    """Trains with a batch, and cleans up."""
    import gc
    import re

    import torch

    from distdl.distributed import process_group
    from distdl.util.redact import redact

    torch.cuda.reset_peak_memory_stats()
    try:
        if batch == request.batches[0]:
            process_group.connect(request.environment, request.resources.accelerator)
        train(request, batch)
    except Exception as error:  # anything that a training may raise
        text = redact(next(iter(str(error).strip().splitlines()), type(error).__name__))
        lacks = isinstance(error, torch.cuda.OutOfMemoryError) or bool(re.search(NO_MEMORY, text))
        return TrialOutcome(batch, 0, "out of memory" if lacks else text, lacks)
    memory = max(torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated())
    gc.collect()
    torch.cuda.empty_cache()
    return TrialOutcome(batch, memory)


def train(request: TrialRequest, batch: int) -> None:
    from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ProgressBar
    from omegaconf import OmegaConf

    from distdl.callbacks import Checkpointer, StepMetrics
    from distdl.config import recipe as configs
    from distdl.ranks.stopping import StopRequest
    from distdl.worker.briefly import train_briefly

    changes = {"data.batch_size": batch, "trainer.max_steps": STEPS}
    if request.config.model.get("compile") == "measured":  # which it will be, with this batch
        changes["model.compile"] = False
    config = configs.merge(request.config, OmegaConf.create({}), changes)
    # Callbacks may need memory, as the averaged weights do. These write, or judge metrics.
    without = (Checkpointer, StepMetrics, Checkpoint, EarlyStopping, ProgressBar)
    train_briefly(config, request.environment, request.resources, StopRequest(), without)


if __name__ == "__main__":
    main()
