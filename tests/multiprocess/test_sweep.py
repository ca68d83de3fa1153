"""`-m`: every combination is a run and a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from omegaconf import OmegaConf

from distdl.job import JobState
from distdl.launch import sweeps
from distdl.ranks.stopping import MEANING
from tests.conftest import TINY, distdl, losses, status

SHORT = (*TINY, "data.train_samples=16", "data.val_samples=8", "trainer.max_epochs=1")

# Writes down the variables that this process was born with, and its number.
PROBE = """
import json, os
from pathlib import Path
from lightning.pytorch import Callback

class Probe(Callback):
    def on_fit_start(self, trainer, module):
        born = Path("/proc/self/environ").read_text().split("\\0")
        told = {"pid": os.getpid(), "born": born, "seed": os.environ.get("PL_GLOBAL_SEED")}
        Path(trainer.default_root_dir, "probe.json").write_text(json.dumps(told))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_two_members_are_two_runs(command, without_stage_2, tmp_path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    typed = ("name=s", "seed=1,2", "+callbacks.probe._target_=probe.Probe")
    done = distdl("-m", *SHORT, *typed, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted((tmp_path / "outputs/default/s").iterdir())
    assert len(runs) == 2
    seeds = {OmegaConf.load(run / "config.yaml").seed for run in runs}
    assert seeds == {1, 2}
    first, second = map(losses, runs)
    assert sorted(first) == [1, 2] and first != second

    # Nothing leaks from one to the next: other processes, and none was born with a rank.
    told = [json.loads((run / "probe.json").read_text()) for run in runs]
    assert len({each["pid"] for each in told}) == 2
    assert {each["seed"] for each in told} == {"1", "2"}
    names = {variable.split("=")[0] for each in told for variable in each["born"]}
    assert not names & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "DISTDL_LAUNCHER"}
    assert not names & {"PL_GLOBAL_SEED", "NODE_RANK"}

    # A table at the end: what, how it ended, what came out, where it is.
    table = done.stdout[done.stdout.rindex("overrides") :]
    for run in runs:
        (row,) = (line for line in table.splitlines() if f"outputs/default/s/{run.name}" in line)
        accuracy = status(run)["metrics"]["val/acc1"]
        assert "succeeded" in row and f"val/acc1 {accuracy:.4g}" in row and "seed=" in row

    # Started again, in another order and under other circumstances, nothing is left to do.
    again = command("launcher.max_attempts=1", *SHORT, *reversed(typed), "-m")
    assert again.code == 0, again
    assert again.out.count("succeeded before, skipped") == 2
    assert all([a.name for a in (run / "attempts").iterdir()] == ["001"] for run in runs)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose process a sweep would start; each of them ends as `states` says."""
    names: list[str] = []
    states = {"2": JobState.FAILED}

    def run_one(each, turn) -> JobState:
        names.append(str(each.config.seed))
        if not each.run.exists:
            each.run.create(OmegaConf.to_yaml(each.recipe), {})
        record = {"run_id": each.run_id, "where": {"task": {"_target_": "t"}}}
        state = states.pop(str(each.config.seed), JobState.SUCCEEDED)
        each.run.begin_attempt(record).end(state, metrics={"val/acc1": 0.5})
        return state

    monkeypatch.setattr(sweeps, "run_one", run_one)
    return names


def test_started_again_it_goes_on_with_what_failed(command, without_stage_2, started) -> None:
    first = command("-m", "seed=1,2,3", "name=s")
    assert first.code == 1 and started == ["1", "2", "3"]
    assert "failed" in first.out
    started.clear()
    # Where it runs is not a part of what a member is.
    second = command("-m", "seed=1,2,3", "name=s", "launcher.max_attempts=2", "trainer.devices=1")
    assert (second.code, started) == (0, ["2"])
    started.clear()
    # A member more: only that one runs.
    assert command("-m", "seed=1,2,3,4", "name=s").code == 0 and started == ["4"]


def test_what_a_sweep_and_its_members_are_named_by(
    command, without_stage_2, started, tmp_path
) -> None:
    for typed in (["seed=1,3"], ["seed=1,3,4"], ["seed=1,3", "optimizer.lr=0.2"]):
        assert command("-m", *typed).code == 0
    assert started == ["1", "3", "4", "1", "3"]
    assert len(list((tmp_path / "outputs/default").iterdir())) == 2
    # One recipe on one and on two devices: two runs, though their config.yaml are the same.
    said = command("-m", "trainer.devices=1,2", "trainer.accelerator=cpu", "name=s")
    assert said.code == 0
    configs = [run / "config.yaml" for run in (tmp_path / "outputs/default/s").iterdir()]
    assert len(configs) == 2 and len({config.read_text() for config in configs}) == 1


def test_one_bad_member_refuses_all(command, without_stage_2, started, tmp_path) -> None:
    said = command("-m", "seed=1,x", "optimizer.lr=0.1,0.2,fast", "data.batch_size=nine")
    assert said.code == 2 and started == []
    # Told once, and not once a member.
    assert said.err.startswith("distdl: 3 problems, nothing was started")
    for words in ("seed: must be an int", "optimizer.lr: must be a n", "data.batch_size: must be"):
        assert said.err.count(words) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, None])
def test_what_ends_the_sweep(command, without_stage_2, started, monkeypatch, stop) -> None:
    """A signal between two members, or a member that was stopped itself."""
    run_one = sweeps.run_one

    def run_and_stop(each, turn) -> JobState:
        state = run_one(each, turn)
        if stop is None:
            return JobState.PREEMPTED
        os.kill(os.getpid(), stop)
        return state

    monkeypatch.setattr(sweeps, "run_one", run_and_stop)
    number = stop or signal.SIGTERM
    before = signal.getsignal(number)
    said = command("-m", "seed=1,3,4", "name=s")
    assert (said.code, started) == (MEANING[number].exit_code, ["1"])
    assert "To resume:\n  python -m distdl -m seed=1,3,4 name=s\n" in said.out
    assert "pending" in said.out and signal.getsignal(number) is before


def test_a_member_that_runs_elsewhere_is_no_traceback(
    without_stage_2, tmp_path, monkeypatch, capfd
) -> None:
    """Its process is refused, and the sweep goes on to its table."""
    monkeypatch.chdir(tmp_path)
    typed = ["seed=1", "name=s", "trainer.accelerator=cpu"]
    planned = sweeps.plan(typed, [], [])
    planned.run.create(OmegaConf.to_yaml(planned.recipe), {})
    where = {"task": {"_target_": "t"}}
    attempt = planned.run.begin_attempt({"run_id": planned.run_id, "where": where})
    attempt.begin()
    attempt.update(host="elsewhere")
    assert sweeps.main(typed) == 1
    told = capfd.readouterr()
    assert "Traceback" not in told.err and "attempt 1 is running" in told.err
    assert "running" in told.out[told.out.rindex("overrides") :]
    assert len(planned.run.attempts()) == 1
