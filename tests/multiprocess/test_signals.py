"""A signal to every process of a run, or to its first alone: the ranks save and end, under every
launcher of this machine, in a first and in a second attempt (signalled.py)."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from distdl.runs.checkpoints import CheckpointStore
from distdl.util.exit_codes import EXIT_PREEMPTED
from tests.conftest import UNCHECKED, Background, distdl, status
from tests.multiprocess import signalled
from tests.waiting import until

MATRIX = bool(os.environ.get("DISTDL_MATRIX"))
SEED = int(os.environ.get("DISTDL_SEED", 33))
NODES = {
    "model/net": "_target_: mine.Net\nkill: false",
    "data/rows": "_target_: mine.Data\npause: 0.01\nstart: fork",
}
COMMON = (
    "model=net",
    "data=rows",
    "~optimizer",
    "~schedule",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=1",
    "strategy=ddp",
    "tracking=none",
    "checkpoint.monitor=null",
    "checkpoint.every_n_steps=2",
    "experiment_name=e",
)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts")
TWO = ("trainer.devices=2",)
# How the ranks are started -> the module that Python runs, its arguments; n: further attempts.
STARTS = {
    "local": lambda n: (UNCHECKED, (*TWO, f"launcher.max_attempts={n}")),
    "mpi": lambda n: (UNCHECKED, (*TWO, "launcher=mpi", f"launcher.max_attempts={n}")),
    "torchrun": lambda n: ((*TORCHRUN, str(n), "-m", "distdl"), ()),
}
NAMES = ("SIGTERM", "SIGUSR1", "SIGHUP")
EVERY, FIRST = "every process", "the first"


def make_project(folder: Path) -> Path:
    shutil.copy(signalled.__file__, folder / "mine.py")
    for path, text in NODES.items():
        (folder / "conf" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "conf" / f"{path}.yaml").write_text(f"{text}\n")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last checkpoint of a run that nobody has signalled."""
    folder = make_project(tmp_path_factory.mktemp("whole"))
    done = distdl(*COMMON, *TWO, "name=s", "data.pause=0", cwd=folder, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return last_checkpoint(folder)


def last_checkpoint(folder: Path) -> dict[str, Any]:
    newest = CheckpointStore(folder / "outputs/e/s/checkpoints").newest()
    assert newest is not None
    return torch.load(newest, weights_only=True)


def tensors(value: Any, name: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from tensors(item, f"{name}.{key}")


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of weights and optimizer states that are not equal in every bit."""
    first, second = (
        dict(tensors({k: c[k] for k in ("state_dict", "optimizer_states")})) for c in (one, other)
    )
    assert first.keys() == second.keys()
    assert len(first) >= 8
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


def steps(folder: Path, rank: int = 0) -> list[int]:
    file = folder / f"steps-{rank}"
    return [*map(int, file.read_text().split())] if file.exists() else []


def everyone(job: Background) -> list[psutil.Process]:
    """The processes of a command; a process that ends meanwhile is left out."""
    command = psutil.Process(job.process.pid)
    return [command, *command.children(recursive=True)]


def signal_and_resume(
    how: str, kind: str, attempt: int, number: str, step: int, project: Path, job: Background
) -> list[str]:
    """Signals a run that has reached a step, resumes it, and returns what is wrong."""
    run = project / "outputs/e/s"
    job.until(lambda: attempt == 1 or status(run, 2).get("state") == "RUNNING")
    job.until(lambda: (attempt == 1 or (project / "killed").exists()) and step in steps(project))
    targets = everyone(job)[: None if kind == EVERY else 1]
    random.shuffle(targets)
    for each in targets:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.Signals[number])
    code = job.wait()
    record = status(run, attempt)
    checks = {"state": (record.get("state"), "PREEMPTED")}
    if how != "torchrun":  # which has an exit code of its own
        checks["code"] = (code, EXIT_PREEMPTED)
    file = run / "checkpoints/last.ckpt.manifest.json"
    manifest = json.loads(file.read_text()) if file.exists() else {}
    checks["saved"] = (manifest.get("step"), steps(project)[-1])
    checks["reason"] = (manifest.get("reason"), "signal")
    checks["ranks"] = (steps(project)[-1], steps(project, 1)[-1])
    with suppress(AssertionError):
        until(lambda: not any(map(psutil.Process.is_running, targets)), 20)
    left = [" ".join(each.cmdline())[:80] for each in targets if each.is_running()]
    checks["processes left"] = (left, [])
    return [f"{name}: {is_} for {shall}" for name, (is_, shall) in checks.items() if is_ != shall]


def start(background, how: str, attempt: int, project: Path) -> Background:
    module, words = STARTS[how](attempt - 1)
    words = (*COMMON, *words, "name=s", f"model.kill={str(attempt == 2).lower()}")
    return background(*words, cwd=project, module=module)


def resumed(how: str, project: Path) -> str:
    module, _ = STARTS[how](0)
    done = distdl("resume", "outputs/e/s", cwd=project, module=module)
    return "" if done.returncode == 0 else f"resume: {done.stdout}{done.stderr}"


def test_the_last_step_is_saved_in_a_second_attempt(background, project, undisturbed) -> None:
    """Its ranks are forks of the standby process, which gets the signal too."""
    job = start(background, "local", 2, project)
    wrong = signal_and_resume("local", EVERY, 2, "SIGTERM", 12, project, job)
    assert not wrong, f"{wrong}\n{job.output()}"
    failed = resumed("local", project)
    assert not failed, failed
    assert differing(last_checkpoint(project), undisturbed) == []


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("kind", [EVERY, FIRST])
@pytest.mark.parametrize("how", STARTS)
def test_five_of_five(how, kind, attempt, background, tmp_path, undisturbed, capsys) -> None:
    if how == "mpi" and not shutil.which("mpirun"):
        pytest.skip("apt-get install openmpi-bin")
    draw = random.Random(f"{SEED} {how} {kind} {attempt}")
    rows = []
    for trial in range(5):
        folder = tmp_path / str(trial)
        folder.mkdir()
        project = make_project(folder)
        # Torch's agents end their ranks by SIGTERM; SIGHUP ends no run that mpirun has started.
        number = NAMES[0] if how != "local" or trial < 3 else NAMES[trial - 2]
        step = draw.randint(6, 50)
        job = start(background, how, attempt, project)
        wrong = signal_and_resume(how, kind, attempt, number, step, project, job)
        if failed := "" if wrong else resumed(how, project):
            wrong.append(failed)
        if not wrong:
            wrong += differing(last_checkpoint(project), undisturbed)
        at = steps(project)
        rows.append((trial, number, step, at[-1] if at else None, "; ".join(wrong) or "ok"))
        if wrong:
            rows.append(("", "", "", "", job.output()[-3000:]))
        time.sleep(0.1)
    with capsys.disabled():
        print(f"\n{how}, {kind}, attempt {attempt} (seed {SEED})")
        for row in rows:
            print("  ", *row)
    assert all(row[-1] == "ok" for row in rows)
