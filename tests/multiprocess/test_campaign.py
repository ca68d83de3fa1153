"""Signals and kills at moments spread evenly over a run, on 1, 2 and 3 ranks: each run, resumed,
ends with the weights and samples of one that was never disturbed, and the killed rank is named.

One disturbance in each phase of twelve trainings (disturbed.py), 60 in all, is in `make matrix`,
which prints a table. `$DISTDL_SEED` chooses moments, ranks and signals.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from distdl.runs.checkpoints import CheckpointStore
from distdl.util.exit_codes import EXIT_PREEMPTED
from tests.conftest import UNCHECKED, distdl, losses, samples, status
from tests.multiprocess import disturbed

MATRIX = bool(os.environ.get("DISTDL_MATRIX"))
SEED = int(os.environ.get("DISTDL_SEED", 33))
PHASES = ("set-up", "training", "validation", "checkpoint", "end")
EMA = "distdl.callbacks.EMAWeightAveraging"
SWA = "lightning.pytorch.callbacks.StochasticWeightAveraging"
COMMON = (
    "trainer.accelerator=cpu",
    "trainer.max_epochs=3",
    "tracking=none",
    "experiment_name=e",
    "callbacks=[default,record_samples]",
    "+callbacks.points._target_=mine.Points",
    "model=ours",
    "checkpoint.monitor=val_loss",
    "checkpoint.mode=min",
)
OWN = ("data=ours", "optimizer=none", "schedule=none", "checkpoint.every_n_steps=4")
# The module, and overrides.
IDIOMS = {
    "ema": ("Plateau", [f"+callbacks.ema._target_={EMA}", "+callbacks.ema.decay=0.5"]),
    "swa": (
        "Plain",
        [
            f"+callbacks.swa._target_={SWA}",
            "+callbacks.swa.swa_lrs=0.01",
            "+callbacks.swa.swa_epoch_start=1",
        ],
    ),
    "by hand": ("ByHand", ["trainer.val_check_interval=3"]),
    "own": ("Net", ["+callbacks.swaps._target_=mine.Swaps", "data.workers=1", "data.loaders=2"]),
}
STRATEGIES = ("single", "fsdp", "deepspeed_zero2", "deepspeed_zero3", "pipeline", "local_sgd")
IMAGES = """
defaults:
  - classifier
  - _self_
network:
  _target_: mine.network
  num_classes: ${data.num_classes}
"""
SYNTHETIC = (
    "data=synthetic",
    "data.image_size=8",
    "data.num_classes=10",
    "data.train_samples=24",
    "data.val_samples=24",
    "schedule.warmup_epochs=0",
    "checkpoint.monitor=val/loss",
)
TRAININGS = [*itertools.product((1, 2, 3), IDIOMS)]
CHOSEN = TRAININGS if MATRIX else [(3, "ema")]


@dataclass
class Disturbance:
    """A signal that a rank sends to itself, or to the command above, at one of its points."""

    phase: str
    rank: int
    number: signal.Signals
    to: str
    share: float  # of the phase, at which it comes

    def variables(self, points: dict[str, int], flag: Path) -> dict[str, str]:
        at = 1 + int(self.share * points[self.phase])
        plan = {"phase": self.phase, "at": at, "rank": self.rank, "to": self.to}
        return {"DISTURB": json.dumps(plan | {"signal": int(self.number), "flag": str(flag)})}


def disturbances(ranks: int, idiom: str) -> list[Disturbance]:
    """One in each phase. Those of a phase in all trainings are spread evenly over it."""
    chosen = []
    for phase in PHASES if MATRIX else ("validation",):
        draw = random.Random(f"{SEED} {phase}")
        places = draw.sample(range(len(TRAININGS)), len(TRAININGS))
        kinds = [
            (signal.SIGKILL, "rank"),
            (signal.SIGTERM, "rank"),
            (signal.SIGTERM, "command"),
            (signal.SIGKILL, "rank"),
            (signal.SIGUSR1, "command"),
            (signal.SIGTERM, "rank"),
        ]
        kinds = draw.sample(kinds * 2, len(TRAININGS))
        index = TRAININGS.index((ranks, idiom))
        number, to = kinds[index]
        share = (places[index] + draw.random()) / len(TRAININGS)
        if not MATRIX:  # in the second of three validations
            number = signal.SIGTERM
            to = "rank"
            share = 0.5
        rank = random.Random(f"{SEED} {phase} {index}").randrange(ranks)
        chosen.append(Disturbance(phase, rank, number, to, share))
    return chosen


def command(folder: Path, *arguments: str, **env: str) -> Any:
    return distdl(*arguments, cwd=folder, module=UNCHECKED, env=env)


def differing(one: Any, other: Any, where: str = "") -> list[str]:
    """The places at which two checkpoints differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [name for key in one for name in differing(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [name for n, (a, b) in pairs for name in differing(a, b, f"{where}.{n}")]
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    same = torch.equal(one, other) if tensors else one is other or one == other
    return [] if same else [where]


def last_checkpoint(run: Path) -> Any:
    newest = CheckpointStore(run / "checkpoints").newest()
    assert newest is not None
    return torch.load(newest, weights_only=True)


def surviving(run: Path) -> dict[tuple[int, int], list[int]]:
    """(epoch, step) -> the ids of that step over all ranks; a later attempt's count."""
    steps: dict[tuple[int, int], list[int]] = {}
    for _, each in sorted(samples(run).items()):
        steps |= {key: sorted(ids) for key, ids in each.items()}
    return steps


def faults(run: Path, done: Any, each: Disturbance, ranks: int) -> list[str]:
    """What is wrong with how the disturbed attempt ended."""
    record = status(run)
    report = run / "attempts/001/incident.md"
    killed = each.number == signal.SIGKILL
    if killed and ranks == 1:  # the command itself, which cannot say anything any more
        return [] if done.returncode in (-9, 137) else [f"code {done.returncode}"]
    if not killed:
        ends = [(EXIT_PREEMPTED, "PREEMPTED")]
        if each.phase in ("checkpoint", "end") or each.share > 0.9:  # perhaps after the last step
            ends.append((0, "SUCCEEDED"))
        ended = (done.returncode, record.get("state")) in ends
        unnamed = "first_error" not in record and not report.exists()
        return [] if ended and unnamed else [f"{done.returncode} {record.get('state')}"]
    named = (record.get("first_error") or {}).get("rank")
    title = report.read_text().splitlines()[0] if report.exists() else "missing"
    wrong = [] if named == each.rank else [f"status.json names {named}"]
    if title != f"## Rank {each.rank}: killed":
        wrong.append(f"incident.md: {title}")
    return wrong


def undisturbed(folder: Path, words: tuple[str, ...]) -> Path:
    """The run `whole`; each of its ranks writes how many points it has passed."""
    whole = command(folder, *words, "name=whole", COUNTS=str(folder / "counts"))
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert len(surviving(folder / "outputs/e/whole")) == 3 * disturbed.STEPS
    return folder / "outputs/e/whole"


def disturb(
    whole: Path, words: tuple[str, ...], each: Disturbance, ranks: int, name: str = ""
) -> tuple[str, Any]:
    """Runs once more, disturbed, and resumes if it did not succeed; a row of the table, and what is
    wrong with it."""
    folder = whole.parents[2]
    name = name or each.phase.replace("-", "")
    run = whole.parent / name
    flag = folder / f"flag-{name}"
    points = json.loads((folder / f"counts-{each.rank}.json").read_text())
    variables = each.variables(points, flag)
    done = command(folder, *words, f"name={name}", **variables)
    wrong = faults(run, done, each, ranks) + ["not disturbed"] * (not flag.exists())
    newest = CheckpointStore(run / "checkpoints").newest()
    if done.returncode:
        done = command(folder, "resume", str(run))
    if done.returncode:
        wrong.append(f"resume: {done.stderr[-800:]}")
    else:
        wrong += differing(last_checkpoint(whole), last_checkpoint(run))
        if surviving(run) != surviving(whole):
            wrong.append("samples")
    at = f"{json.loads(variables['DISTURB'])['at']}/{points[each.phase]}"
    row = f"{each.phase:10} {at:>8} {each.number.name:8} {each.to:8} rank {each.rank}"
    return f"{row}  from {newest.name if newest else 'start':24} {wrong or 'equal'}", wrong


def project(folder: Path, **files: str) -> None:
    """A folder with the code, and configs by group."""
    shutil.copy(disturbed.__file__, folder / "mine.py")
    shutil.copy(Path(disturbed.__file__).with_name("meshed.py"), folder)
    for group, text in files.items():
        (folder / "conf" / group).mkdir(parents=True)
        (folder / f"conf/{group}/ours.yaml").write_text(text)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("ranks", "idiom"), CHOSEN)
def test_a_disturbed_run_ends_as_if_undisturbed(ranks, idiom, tmp_path, capsys):
    module, overrides = IDIOMS[idiom]
    rows = "_target_: mine.Data\nworkers: 0\nloaders: 1\n"
    project(tmp_path, model=f"_target_: mine.{module}\n", data=rows)
    several = ["strategy=ddp"] if ranks > 1 else []
    words = (*OWN, *COMMON, *overrides, f"trainer.devices={ranks}", *several)
    whole = undisturbed(tmp_path, words)
    results = [disturb(whole, words, each, ranks) for each in disturbances(ranks, idiom)]
    with capsys.disabled():
        print("", *(f"{ranks} {idiom:8} {row}" for row, _ in results), sep="\n", end=" ")
    assert not [wrong for _, wrong in results if wrong]


if MATRIX:
    # A signal in the middle of a validation, and kill -9 inside the second of three epochs.
    ENDINGS = [("validation", signal.SIGTERM), ("training", signal.SIGKILL)]

    # Averages are validated and saved, and the network has batch norm.
    NORMED = "model.network._target_=mine.normed"
    FREE = ("optimizer=schedulefree", "schedule=constant", NORMED)
    ALL = [(strategy, ()) for strategy in STRATEGIES]
    ALL += [(strategy, FREE) for strategy in ("single", "ddp", "fsdp")]
    # Two groups of two ranks.
    ALL += [("model_parallel", ("model._target_=meshed.Meshed", "strategy.data_parallel_size=2"))]

    @pytest.mark.parametrize(("phase", "number"), ENDINGS)
    @pytest.mark.parametrize(("strategy", "free"), ALL)
    def test_any_strategy_ends_as_if_undisturbed(strategy, free, phase, number, tmp_path):
        project(tmp_path, model=IMAGES)
        ranks = {"single": 1, "model_parallel": 4}.get(strategy, 2)
        alone = strategy in ("single", "pipeline")  # a rank whose batch is the global one
        more = [f"data.batch_size={4 if alone else 2}", f"trainer.devices={ranks}"]
        more += ["strategy.micro_batches=2"] if strategy == "pipeline" else []
        more += free
        words = (*COMMON, *SYNTHETIC, "checkpoint.every_n_steps=2", f"strategy={strategy}", *more)
        each = Disturbance(phase, ranks - 1, number, "rank", 0.5)
        row, wrong = disturb(undisturbed(tmp_path, words), words, each, ranks)
        assert not wrong, row

    # Before, at and after the epoch from which on more is trained.
    AROUND = [
        ("training", signal.SIGKILL, 0.2),
        ("training", signal.SIGTERM, 0.5),
        ("training", signal.SIGKILL, 0.9),
        ("end", signal.SIGKILL, 0.0),
        ("set-up", signal.SIGKILL, 0.99),
        ("set-up", signal.SIGTERM, 0.99),
    ]
    LATER = (
        "model.freeze=['1','2']",
        "model.unfreeze_at=1",
        "optimizer.layer_decay=0.5",
        "+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping",
        "+callbacks.stop.monitor=val/loss",
        "+callbacks.stop.patience=9",
        "tracking=csv",
        "trainer.log_every_n_steps=1",
    )

    @pytest.mark.timeout(1200)
    @pytest.mark.parametrize("strategy", ["ddp", *STRATEGIES[1:]])
    def test_any_strategy_unfreezes_as_if_undisturbed(strategy, tmp_path, capsys):
        project(tmp_path, model=IMAGES)
        alone = strategy == "pipeline"  # a rank whose batch is the global one
        more = [f"data.batch_size={4 if alone else 2}", "trainer.devices=2"]
        more += ["strategy.micro_batches=2"] if alone else []
        words = (*COMMON, *SYNTHETIC, "checkpoint.every_n_steps=2", f"strategy={strategy}", *more)
        words = (*(word for word in words if not word.startswith("tracking=")), *LATER)
        if strategy == "local_sgd":  # a save for a signal is one more meeting, as any save is
            words = (*words, "checkpoint.every_n_steps=1")
        whole = undisturbed(tmp_path, words)
        # One attempt, in which the loggers have each step and each validation once.
        read_by = 2 if alone else 1  # both stages of a pipeline read a sample
        assert {len(ids) for ids in surviving(whole).values()} == {4 * read_by}
        assert [path.name for path in (whole / "attempts").iterdir()] == ["001"]
        (table,) = whole.rglob("metrics.csv")
        rows = [*csv.DictReader(table.open())]
        assert [row["epoch"] for row in rows if row.get("val/loss")] == ["0", "1", "2"]
        assert [*losses(whole)] == [*range(1, 3 * disturbed.STEPS + 1)]
        results = [
            disturb(whole, words, Disturbance(phase, 1, number, "rank", share), 2, f"r{index}")
            for index, (phase, number, share) in enumerate(AROUND)
        ]
        with capsys.disabled():
            print("", *(f"{strategy:16} {row}" for row, _ in results), sep="\n", end=" ")
        assert not [wrong for _, wrong in results if wrong]
