"""How long a checkpoint of 200 MB holds up the training: distdl against `trainer.save_checkpoint`.

Both train the same module and data by the same Trainer, on all cores, in one process. Runs without
a checkpoint, with Lightning's and with distdl's take turns. Each saves once to warm up and once at
the start of a window of steps. Lightning neither syncs nor hashes the file.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.table import Result, row

REPEATS = 5
WARM_UP, WINDOW = 3, 30  # steps
# 25 million weights, and as much momentum: 201 MB.
WIDTH = 2048
LAYERS = 6


class Wide(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Arm(Callback):
    """Saves after the first step and after the warm-up, and times the steps that follow.

    Attributes:
        stalls: Seconds from the end of a batch to the next one, with the first save and the second.
        window: Seconds of the steps, until the checkpoint is written completely.
        idle: Seconds from the end of a batch to the next one where nothing is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stalls: list[float] = []
        self.idle: list[float] = []
        self.window = self._started = 0.0

    @property
    def callbacks(self) -> list[Callback]:
        return [self]

    def save(self, trainer: Trainer, step: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # What Lightning's loop does after a batch: there distdl saves, too.
        loop: Any = trainer.fit_loop.epoch_loop
        loop.on_advance_end = functools.partial(self._after_batch, trainer, loop.on_advance_end)

    def _after_batch(self, trainer: Trainer, original: Callable[[Any], None], fetcher: Any) -> None:
        step = trainer.global_step
        if step == WARM_UP:
            self._started = time.perf_counter()
        started = time.perf_counter()
        self.save(trainer, step)
        original(fetcher)
        taken = time.perf_counter() - started
        (self.stalls if step in (1, WARM_UP) else self.idle).append(taken)
        if step == 1:
            self.settle()
        if step == WARM_UP + WINDOW:
            self.settle()
            self.window = time.perf_counter() - self._started


class Lightning(Arm):
    def save(self, trainer: Trainer, step: int) -> None:
        if step in (1, WARM_UP):
            trainer.save_checkpoint(self.folder / "lightning.ckpt")


class Distdl(Arm):
    """The real callback, which decides at every step whether it saves."""

    def __init__(self, folder: Path) -> None:
        from distdl.callbacks import Checkpointer
        from distdl.config.schema import Checkpoint
        from distdl.data.sampling import TrainPosition
        from distdl.ranks.stopping import StopRequest
        from distdl.runs.checkpoints import CheckpointStore

        super().__init__(folder)
        self.ours = Checkpointer(
            CheckpointStore(folder / "distdl"),
            StopRequest(),
            TrainPosition(),
            global_batch_size=1,
            settings=Checkpoint(keep_last=1),
        )

    @property
    def callbacks(self) -> list[Callback]:
        return [self, self.ours]

    def save(self, trainer: Trainer, step: int) -> None:
        self.ours.times.every_n_steps = step if step in (1, WARM_UP) else math.inf

    def settle(self) -> None:
        self.ours.saver.settle()


ARMS: dict[str, type[Arm]] = {"none": Arm, "lightning": Lightning, "distdl": Distdl}


def fit(kind: type[Arm], folder: Path) -> Arm:
    from distdl.checkpoint.formats import AnyCheckpoint
    from distdl.loops.trainer import Trainer as DistdlTrainer

    arm = kind(folder)
    trainer_class = DistdlTrainer if kind is Distdl else Trainer
    trainer = trainer_class(
        accelerator="cpu",
        max_steps=WARM_UP + WINDOW,
        plugins=[AnyCheckpoint()] if kind is Distdl else [],
        callbacks=arm.callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # The epoch is longer than the training, because its end would save as well.
    rows = torch.randn(16 * (WARM_UP + WINDOW + 1), WIDTH)
    trainer.fit(Wide(), DataLoader(rows, 16))  # type: ignore[arg-type]
    return arm


def main() -> Result:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    runs: dict[str, list[Arm]] = {name: [] for name in ARMS}
    try:
        with tempfile.TemporaryDirectory() as folder:
            fit(Distdl, Path(folder))  # imports and caches
            for _ in range(REPEATS):
                for name, kind in ARMS.items():
                    runs[name].append(fit(kind, Path(folder)))
    finally:
        torch.set_num_threads(threads)
        logging.disable(logging.NOTSET)
    first = {}
    stall = {}
    window = {}
    for name in ("lightning", "distdl"):
        first[name] = [1e3 * arm.stalls[0] for arm in runs[name]]
        stall[name] = [1e3 * arm.stalls[1] for arm in runs[name]]
        # The difference from the run without a checkpoint in the same round.
        pairs = zip(runs[name], runs["none"], strict=True)
        window[name] = [1e3 * (arm.window - none.window) for arm, none in pairs]
    idle = {n: [1e6 * s for arm in runs[n] for s in arm.idle] for n in ("none", "distdl")}
    steps = [1e3 * arm.window / WINDOW for arm in runs["none"]]
    with_save = f"{WINDOW} steps with a checkpoint, longer than without"
    return Result(
        title="Time that a checkpoint of 200 MB holds up the training",
        competitor="trainer.save_checkpoint of lightning.Trainer",
        goal="at most 0.10",
        ratio=statistics.median(stall["distdl"]) / statistics.median(stall["lightning"]),
        rows=[
            row("lightning, training stands still", stall["lightning"], "ms"),
            row("distdl, training stands still", stall["distdl"], "ms"),
            row("lightning, first checkpoint of a run", first["lightning"], "ms"),
            row("distdl, first checkpoint of a run", first["distdl"], "ms"),
            row(f"lightning, {with_save}", window["lightning"], "ms"),
            row(f"distdl, {with_save}", window["distdl"], "ms"),
            row("a step, without a checkpoint", steps, "ms"),
            row("after a batch, without a checkpoint", idle["none"], "us"),
            row("after a batch, distdl, where it saves nothing", idle["distdl"], "us"),
        ],
        notes="The training uses all cores, so the writer takes time from it (with sync and "
        "sha256, which Lightning does not do). The rows of whole windows include that time: a "
        "window ends when the file is published.",
        command="python -m benchmarks.run checkpoint",
        what="stall of a checkpoint of 200 MB, against trainer.save_checkpoint",
    )
