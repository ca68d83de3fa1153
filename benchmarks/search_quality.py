"""Whether a search that prunes finds what a grid finds, on photographs at 32 pixels.

    python -m benchmarks.search_quality            # three searches, and the chosen values again
    python -m benchmarks.search_quality grid       # the whole grid, into tests/fixtures

The grid has twelve configurations, trained to the end with three seeds each. Its results were fixed
before any search. A search sees the same twelve, in an order and with a seed of its own. It has
found something if its choice, trained with three further seeds, is within one standard error of the
grid's best, for a third of the grid's epochs. The photographs are `imagenette224` in
$DISTDL_PHOTOGRAPHS.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ctrl_c import one_line
from distdl.callbacks import RecordSamples
from distdl.runs.directory import RunDirectory
from distdl.tools.search.trials import TrialCurve
from distdl.util import atomic_files

ROOT = Path(__file__).resolve().parents[1]
GRID = ROOT / "tests/fixtures/search_grid.json"
COMMAND = "python -m benchmarks.search_quality grid"
METRIC = "val/acc1"
EPOCHS = 6
SPACES = ("optimizer.lr=0.004,0.03,0.2,1.5", "data.batch_size=32,64,128")
GRID_SEEDS = (101, 102, 103)
SEARCH_SEEDS = (1, 2, 3)
NEW_SEEDS = (201, 202, 203)
SETTINGS = (
    "model=classifier",
    "model.network._target_=torchvision.models.shufflenet_v2_x0_5",
    "+model.network.num_classes=10",
    "data=imagenet",
    "data.num_classes=10",
    "data.image_size=32",
    "data.val_crop_size=32",
    "data.val_resize_size=36",
    "data.scale=[0.35,1.0]",
    "data.num_workers=0",
    "optimizer=sgd",
    "schedule=cosine",
    "schedule.warmup_epochs=1",
    "strategy=auto",
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    f"trainer.max_epochs={EPOCHS}",
    "tracking=none",
    f"checkpoint.monitor={METRIC}",
    "checkpoint.mode=max",
    f"+callbacks.samples={{_target_: distdl.callbacks.{RecordSamples.__name__}}}",
)


def main(words: Sequence[str]) -> int:
    if list(words) not in ([], ["grid"]):
        print("usage: python -m benchmarks.search_quality [grid]")
        return 2
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        prepare(work)
        if words:
            found = {"command": COMMAND, "rows": grid(work)}
            atomic_files.write_bytes(GRID, json.dumps(found, indent=1).encode() + b"\n")
            return 0
        return 0 if search(work, json.loads(GRID.read_text())["rows"]) else 1


def prepare(work: Path) -> None:
    """The photographs, scaled once, as pixels: decoding them would take longer than training."""
    source = Path(os.environ.get("DISTDL_PHOTOGRAPHS", ROOT.parent / "shared/images"))
    scaled = ("--short-side", "40", "--raw-fraction", "1", "--workers", "1")
    places = ("--source", str(source / "imagenette224"), "--to", str(work / "data"))
    distdl(work, "prepare", "folder", *places, *scaled)


def grid(work: Path) -> list[dict[str, Any]]:
    """Every configuration, with every validation of every seed."""
    rows: dict[tuple[float, int], dict[str, list[float]]] = {}
    for seed in GRID_SEEDS:
        distdl(work, "-m", *trained(work), *SPACES, f"seed={seed}", f"name=grid{seed}")
        for path in (work / f"outputs/default/grid{seed}").iterdir():
            config = RunDirectory(path).recipe()
            key = (config.optimizer.lr, config.data.batch_size)
            rows.setdefault(key, {})[str(seed)] = validations(path)
    return [
        {"optimizer.lr": rate, "data.batch_size": batch, METRIC: values}
        for (rate, batch), values in sorted(rows.items())
    ]


def search(work: Path, rows: list[dict[str, Any]]) -> bool:
    """Three searches, and what is said of them."""
    means = {key_of(row): statistics.fmean(map(max, row[METRIC].values())) for row in rows}
    best = max(means.values())
    error = math.sqrt(best * (1 - best) / samples_of(work))
    print(f"grid: best {best:.3f}, worst {min(means.values()):.3f}, standard error {error:.3f}")
    fine = True
    for seed in SEARCH_SEEDS:
        name = f"search{seed}"
        typed = (*trained(work), *SPACES, f"seed={seed}", f"name={name}")
        how = ("--sampler", "grid", "--pruner", "halving")
        answer = json.loads(distdl(work, "tune", *typed, *how, "--json").splitlines()[-1])["answer"]
        runs = [work / trial["run"] for trial in answer["trials"]]
        steps = [step for run in runs for step in steps_of(run)]
        epochs = sum(len(validations(run)) for run in runs)
        chosen = answer["trials"][answer["best"]]["overrides"].split()
        again = []
        for new in NEW_SEEDS:
            names = (f"seed={new}", f"name={name}-{new}")
            distdl(work, *trained(work), *chosen, *names)
            again.append(max(validations(work / f"outputs/default/{name}-{new}")))
        mean = statistics.fmean(again)
        share = epochs / (EPOCHS * len(rows))
        once = len(steps) == len({*steps})
        reached = mean >= best - error and share <= 1 / 3 and once
        fine = fine and reached
        values = ", ".join(f"{value:.3f}" for value in again)
        print(
            f"search {seed}: {' '.join(chosen)}: {mean:.3f} ({values}), {share:.2f} of the grid's "
            f"epochs, {'none' if once else 'SOME'} trained twice: "
            f"{'reached' if reached else 'not reached'}"
        )
    return fine


def trained(work: Path) -> tuple[str, ...]:
    return (*SETTINGS, f"data.root={work / 'data'}", f"project.root={ROOT}")


def key_of(row: dict[str, Any]) -> tuple[float, int]:
    return row["optimizer.lr"], row["data.batch_size"]


def samples_of(work: Path) -> int:
    """The photographs of the validation."""
    splits = json.loads((work / "data/dataset.json").read_text())["splits"]
    return int(splits["val"]["samples"])


def validations(run: Path) -> list[float]:
    curve = TrialCurve(run, METRIC)
    curve.read()
    return [round(value, 4) for value in curve.values]


def steps_of(run: Path) -> list[tuple[str, str]]:
    """The steps that were trained, each once for each time."""
    lines = (run / "logs/samples-rank0.csv").read_text().splitlines()
    return [(str(run), line.split(",")[2]) for line in lines if line[0].isdigit()]


def distdl(work: Path, *words: str) -> str:
    """What the command prints."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "distdl", *words]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words[:2]}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    with one_line("search_quality"):
        sys.exit(main(sys.argv[1:]))
