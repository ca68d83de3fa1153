"""What logging adds to a step: distdl against Lightning's `self.log` + CSVLogger, on a tiny model.

"Added" is the time per step minus that of `Trainer(barebones=True)`. No progress bar on any side.
All arms run the same module, data and optimizer, interleaved, in one process and on one thread.
"""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
import tempfile
import warnings
from pathlib import Path

import torch

from benchmarks.table import Result, row
from benchmarks.tiny import Tiny, TinyData

STEPS = 2000
REPEATS = 7


def barebones(folder: Path) -> float:
    from lightning.pytorch import Trainer

    Trainer(accelerator="cpu", max_epochs=1, barebones=True).fit(Tiny(), TinyData(steps=STEPS))
    return Tiny.seconds_per_step


def lightning(folder: Path) -> float:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Tiny(self_log=True), TinyData(steps=STEPS))
    return Tiny.seconds_per_step


def distdl(folder: Path, *more: str) -> float:
    """The real worker, with its journal, metrics, log lines and checkpoints."""
    from distdl import compose, launch, worker
    from distdl.resources import resolve
    from distdl.run_directory import RunDirectory

    config = compose.compose(
        [
            "model=tiny",
            "data=tiny",
            f"data.steps={STEPS}",
            "optimizer=none",
            "schedule=none",
            "trainer.accelerator=cpu",
            "trainer.max_epochs=1",
            f"output_dir={folder}",
            "tracking=none",
            *more,
        ],
        [str(Path(__file__).with_name("conf"))],
    )
    recipe = launch.configs.recipe_of(config)
    run = RunDirectory(folder / f"run{len(list(folder.iterdir()))}")
    run.create(launch.configs.to_yaml(recipe), {})
    planned = launch.Plan(config, recipe, resolve(config.trainer, local=True), run, "bench/tiny")
    run.begin_attempt(launch.launch_record(planned, Path.cwd()))
    with contextlib.redirect_stdout(io.StringIO()):
        assert worker.main([str(run.path), str(run.path)]) == 0
    return Tiny.seconds_per_step


def main() -> Result:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    arms = {"barebones": barebones, "lightning": lightning, "distdl": distdl}
    times: dict[str, list[float]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as folder:
        for arm in arms.values():
            arm(Path(folder))  # imports and caches
        for _ in range(REPEATS):
            for name, arm in arms.items():
                times[name].append(1e6 * arm(Path(folder)))
    logging.disable(logging.NOTSET)
    floor = statistics.median(times["barebones"])
    added = {name: [t - floor for t in times[name]] for name in ("distdl", "lightning")}
    ratio = statistics.median(added["distdl"]) / statistics.median(added["lightning"])
    return Result(
        title="Added time per training step (us), tiny MLP on one CPU thread",
        competitor="lightning.Trainer + self.log + CSVLogger, no progress bar",
        goal="at most 0.50",
        ratio=ratio,
        rows=[
            row("Trainer(barebones=True), per step", times["barebones"], "us"),
            row("lightning, added", added["lightning"], "us"),
            row("distdl, added", added["distdl"], "us"),
        ],
        command="python -m benchmarks.run overhead",
    )
