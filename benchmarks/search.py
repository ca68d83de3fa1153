"""What a trial of a search costs beside its training: the CPU time of a trial of 20 steps, less
that of 20 steps in one long run. `distdl tune`, against a member of `distdl -m` and against Optuna
with a fresh process of Lightning for each trial.

A search has a fixed cost, too (its checks, one import of torch). So each arm runs with a few trials
and with more, and a trial costs what they differ by.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress

from benchmarks.startup import ROOT, SMALL
from benchmarks.table import Goal, Result, paired, row, turned
from distdl.util.processes import SET_CHILD_SUBREAPER, prctl

FEW = 1
MORE = 3
REPEATS = 3
STEPS = 20
LONG = 100  # times the steps of a trial, for what a step costs

PLAIN = [word for word in SMALL if not word.startswith("data.steps=")]
SCRIPT = """
import sys
from benchmarks.tiny import Tiny, TinyData
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
def train(seed, steps):
    seed_everything(seed, verbose=False)
    trainer = Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=CSVLogger("."),
                      log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Tiny(self_log=True), TinyData(steps=steps))
    return float(trainer.callback_metrics["train/loss"])
"""
ONE = SCRIPT + "print(train(int(sys.argv[1]), int(sys.argv[2])))"
STUDY = """
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
storage = JournalStorage(JournalFileBackend("study.journal"))
study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(seed=0))
def ended(number):
    trial = study.ask()
    study.tell(trial, value(trial.suggest_int("seed", 0, 10**6)))
"""
FRESH = f"""
import subprocess, sys
{STUDY}
def value(seed):
    words = [sys.executable, "-c", {ONE!r}, str(seed), "{STEPS}"]
    return float(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout.split()[-1])
for number in range(int(sys.argv[1])): ended(number)
"""
INSIDE = f"""
{SCRIPT}
{STUDY}
def value(seed): return train(seed, {STEPS})
for number in range(int(sys.argv[1])): ended(number)
"""


def _distdl(*words: str) -> list[str]:
    return ["-m", "distdl", *PLAIN, *words]


def _member(count: int) -> list[str]:
    seeds = ",".join(map(str, range(100, 100 + count)))
    return _distdl("-m", f"data.steps={STEPS}", f"seed={seeds}")


def _trial(count: int) -> list[str]:
    words = [word for word in PLAIN if word != "checkpoint.monitor=null"]
    space = ["model.width=range(32,64)", "--sampler", "random", "--trials", str(count)]
    metric = ["--metric", "train/loss:min", f"data.steps={STEPS}"]
    return ["-m", "distdl", "tune", *words, *space, *metric]


ARMS: dict[str, Callable[[int], list[str]]] = {
    "a member of `distdl -m`": _member,
    "Optuna + Lightning, a fresh process each": lambda count: ["-c", FRESH, str(count)],
    "a trial of `distdl tune`": _trial,
    "Optuna + Lightning, all in one process": lambda count: ["-c", INSIDE, str(count)],
}


def main(repeats: int = REPEATS) -> Result:
    each: dict[str, list[float]] = {name: [] for name in ARMS}
    for repeat in range(repeats):
        for name in turned(list(ARMS), repeat):
            few, more = (cpu_seconds(ARMS[name](count)) for count in (FEW, MORE))
            each[name].append((more - few) / (MORE - FEW))
    costs = {"distdl": _steps(lambda steps: _distdl(f"data.steps={steps}"))}
    costs["Lightning"] = _steps(lambda steps: ["-c", ONE, "0", str(steps)])
    overhead = {
        name: [value - costs["distdl" if "distdl" in name else "Lightning"] for value in values]
        for name, values in each.items()
    }
    member, fresh, trial, inside = overhead.values()
    inside_s = statistics.median(inside)
    return Result(
        title="A trial of a search (CPU s), less the same steps in one long run",
        what="a trial of `distdl tune` against a member of `distdl -m`",
        competitor="a member of a sweep; Optuna 5 with a fresh process of Lightning for each trial",
        goal="at most 0.5",
        ratio=paired(trial, member),
        more=[Goal("against Optuna + Lightning, a fresh process each", "at most 0.5",
                   paired(trial, fresh))],
        rows=[row(name, values, "s") for name, values in overhead.items()],
        command="python -m benchmarks.run search",
        notes=(
            f"{STEPS} steps in a long run: {costs['distdl']:.3f} s in distdl and "
            f"{costs['Lightning']:.3f} s in Lightning. All in one process is {inside_s:.2f} s, and "
            "no goal: a trial that is out of memory ends the search there, and no two run at once."
        ),
    )  # fmt: skip


def _steps(command: Callable[[int], list[str]]) -> float:
    """The CPU seconds of a trial's steps in a long run."""
    short, long = (cpu_seconds(command(steps)) for steps in (STEPS, LONG * STEPS))
    return (long - short) / (LONG - 1)


def cpu_seconds(arguments: Sequence[str]) -> float:
    """The CPU time of a Python process and of all that it starts, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DISTDL_CONF": str(ROOT / "benchmarks/conf"),
            "OMP_NUM_THREADS": "1",
        }
        code = "import sys; from benchmarks.search import watch; watch(sys.argv[1:])"
        words = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(arguments)[:200]}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        )
    return float(json.loads(done.stdout.splitlines()[-1]))


def watch(arguments: Sequence[str]) -> None:
    """Runs Python, and prints the CPU seconds of all its processes. Those whose parent has ended
    become children of this one: a server of forks is waited for by nobody else."""
    prctl(SET_CHILD_SUBREAPER, 1)
    done = subprocess.run([sys.executable, *arguments], stdout=sys.stderr, check=False)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    if done.returncode:
        sys.exit(done.returncode)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(used.ru_utime + used.ru_stime)
