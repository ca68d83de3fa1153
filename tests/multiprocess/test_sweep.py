"""`-m`: every combination is a run and a process of its own."""

import json
import os
import signal

import pytest
from omegaconf import OmegaConf

from distdl.job import JobState
from distdl.launch import sweeps
from distdl.ranks.stopping import STATE_AFTER
from tests.conftest import TINY, UNCHECKED, distdl, losses, status

SHORT = (*TINY, "data.train_samples=16", "data.val_samples=8", "trainer.max_epochs=1")
# Writes down the variables that this process was born with, and its number.
PROBE = """
import json, os
from pathlib import Path
from lightning.pytorch import Callback

class Probe(Callback):
    def on_fit_start(self, trainer, module):
        born = Path("/proc/self/environ").read_text().split("\\0")
        facts = {"pid": os.getpid(), "born": born, "seed": os.environ.get("PL_GLOBAL_SEED")}
        Path(trainer.default_root_dir, "probe.json").write_text(json.dumps(facts))
"""
RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "DISTDL_LAUNCHER"}
RANK_VARIABLES |= {"PL_GLOBAL_SEED", "NODE_RANK"}


def test_two_members_are_two_runs(command, without_stage_2, tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    typed = ("name=s", "seed=1,2", "+callbacks.probe._target_=probe.Probe")
    done = distdl("-m", *SHORT, *typed, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted((tmp_path / "outputs/default/s").iterdir())
    assert sorted(OmegaConf.load(run / "config.yaml").seed for run in runs) == [1, 2]
    first, second = map(losses, runs)
    assert sorted(first) == [1, 2] and first != second

    # Nothing leaks from one to the next: other processes, and none was born with a rank.
    probes = [json.loads((run / "probe.json").read_text()) for run in runs]
    assert len({each["pid"] for each in probes}) == 2
    assert {each["seed"] for each in probes} == {"1", "2"}
    names = {variable.split("=")[0] for each in probes for variable in each["born"]}
    assert not names & RANK_VARIABLES

    table = done.stdout[done.stdout.rindex("overrides") :]
    for run in runs:
        (row,) = (line for line in table.splitlines() if f"outputs/default/s/{run.name}" in line)
        accuracy = status(run)["metrics"]["val/acc1"]
        assert "succeeded" in row and f"val/acc1 {accuracy:.4g}" in row and "seed=" in row

    # Started again, in another order and under other circumstances, nothing is left to do.
    again = command("launcher.max_attempts=1", *SHORT, *reversed(typed), "-m")
    assert again.code == 0 and again.out.count("succeeded before, skipped") == 2
    assert all([a.name for a in (run / "attempts").iterdir()] == ["001"] for run in runs)


@pytest.fixture
def started(without_stage_2, monkeypatch):
    """The seeds of the runs whose process a sweep would start; the first one of seed 2 fails."""
    seeds, states = [], {2: JobState.FAILED}

    def run_one(plan, turn):
        seeds.append(plan.config.seed)
        if not plan.run.exists:
            plan.run.create(OmegaConf.to_yaml(plan.recipe), {})
        state = states.pop(plan.config.seed, JobState.SUCCEEDED)
        record = {"run_id": plan.run_id, "where": {"task": {"_target_": "t"}}}
        plan.run.begin_attempt(record).end(state, metrics={"val/acc1": 0.5})
        return state

    monkeypatch.setattr(sweeps, "run_one", run_one)
    return seeds


def test_what_a_sweep_and_its_members_are_named_by(command, started, tmp_path):
    # Where it runs is not a part of what a member is; one that failed is started again.
    where = ("launcher.max_attempts=2", "trainer.devices=1")
    first = command("-m", "seed=1,2,3", "name=s")
    assert first.code == 1 and started == [1, 2, 3] and "failed" in first.out
    assert command("-m", "seed=1,2,3,4", "name=s", *where).code == 0 and started[3:] == [2, 4]
    for typed in (["seed=1,3"], ["seed=1,3,4"], ["seed=1,3", "optimizer.lr=0.2"]):
        assert command("-m", *typed).code == 0
    assert started[5:] == [1, 3, 4, 1, 3]
    assert len(list((tmp_path / "outputs/default").iterdir())) == 1 + 2
    # One recipe on one and on two devices: two runs, though their config.yaml are the same.
    assert command("-m", "trainer.devices=1,2", "trainer.accelerator=cpu", "name=d").code == 0
    configs = [run / "config.yaml" for run in (tmp_path / "outputs/default/d").iterdir()]
    assert len(configs) == 2 and len({config.read_text() for config in configs}) == 1


def test_one_bad_member_refuses_all(command, started, tmp_path):
    result = command("-m", "seed=1,x", "optimizer.lr=0.1,0.2,fast", "data.batch_size=nine")
    assert result.code == 2 and started == [] and list(tmp_path.iterdir()) == []
    assert result.err.startswith("distdl: 3 problems, nothing was started")
    for path in ("seed: must", "optimizer.lr: must", "data.batch_size: must"):
        assert result.err.count(path) == 1, "reported once, and not once a member"


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, None])
def test_what_ends_the_sweep(command, started, monkeypatch, stop):
    """A signal between two members, or a member that was stopped itself."""
    run_one = sweeps.run_one

    def run_and_stop(plan, turn):
        state = run_one(plan, turn)
        if stop is None:
            return JobState.PREEMPTED
        os.kill(os.getpid(), stop)
        return state

    monkeypatch.setattr(sweeps, "run_one", run_and_stop)
    number = stop or signal.SIGTERM
    before = signal.getsignal(number)
    result = command("-m", "seed=1,3,4", "name=s")
    assert (result.code, started) == (STATE_AFTER[number].exit_code, [1])
    assert "To resume:\n  python -m distdl -m seed=1,3,4 name=s\n" in result.out
    assert "pending" in result.out and signal.getsignal(number) is before
