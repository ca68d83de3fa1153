"""The wall time of whole processes (help, refusals, a small run), against `import
lightning.pytorch` and a bare Lightning script.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.table import Goal, Result, paired, row, turned

REPEATS = 5
ROOT = Path(__file__).resolve().parents[1]
DISTDL = ("-m", "distdl")
SMALL = (
    "model=tiny", "data=tiny", "data.steps=20", "optimizer=none", "schedule=none", "tracking=none",
    "checkpoint.monitor=null", "trainer.max_epochs=1", "trainer.accelerator=cpu",
    "trainer.devices=1", "trainer.precision=32-true", "trainer.log_every_n_steps=1",
    f"project.root={ROOT}",
)  # fmt: skip
SCRIPT = """
from benchmarks.tiny import Tiny, TinyData
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
trainer = Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=CSVLogger("."),
                  log_every_n_steps=1, enable_progress_bar=False)
trainer.fit(Tiny(self_log=True), TinyData(steps=20))
"""
# Name -> arguments of Python, and the exit code.
ARMS: dict[str, tuple[tuple[str, ...], int]] = {
    "import lightning.pytorch": (("-c", "import lightning.pytorch"), 0),
    "distdl --help": ((*DISTDL, "--help"), 0),
    "distdl --cfg job": ((*DISTDL, "+experiment=resnet50_ddp", "--cfg", "job"), 0),
    "refused: trainer.max_epoch=1": ((*DISTDL, "trainer.max_epoch=1"), 2),
    "refused: optimizer.lrr=1": ((*DISTDL, "optimizer.lrr=1"), 2),
    "a bare script of 20 steps, CSVLogger": (("-c", SCRIPT), 0),
    "distdl, the same, tracking=none": ((*DISTDL, *SMALL), 0),
}


def main(repeats: int = REPEATS) -> Result:
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    for repeat in range(repeats + 1):
        for name in turned(list(ARMS), repeat):
            taken = seconds(*ARMS[name])
            if repeat:  # the first fills the file cache
                times[name].append(taken)
    bare, helped, composed, first, second, script, small = times.values()
    return Result(
        title="Start-up (s), whole process",
        what="`--help` wall time against `import lightning.pytorch`",
        competitor="python -c 'import lightning.pytorch'; a bare Lightning script",
        goal="at most 0.10",
        ratio=statistics.median(helped) / statistics.median(bare),
        more=[
            Goal("a typo (`trainer.max_epoch=1`) refused", "at most 0.15", paired(first, bare)),
            Goal(
                "a wrong argument (`optimizer.lrr=1`) refused", "at most 1.1", paired(second, bare)
            ),
            Goal("a run of 20 steps against a bare script", "at most 1.15", paired(small, script)),
        ],
        rows=[row(name, values, "s") for name, values in times.items()],
        command="python -m benchmarks.run startup",
        notes=f"`--cfg job` composes as well: ratio {paired(composed, bare):.3f}",
    )


def seconds(arguments: tuple[str, ...], code: int) -> float:
    """The wall time of a Python process in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "DISTDL_CONF": str(ROOT / "benchmarks/conf")}
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True
        )
        taken = time.perf_counter() - started
    if done.returncode != code:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return taken
