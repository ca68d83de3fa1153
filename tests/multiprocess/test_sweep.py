"""`-m`: every combination is a run and a process of its own."""

import os
import signal

import pytest
from omegaconf import OmegaConf

from distdl.job import JobState
from distdl.launch import sweeps
from distdl.ranks.stopping import STATE_AFTER
from tests.conftest import TINY, losses, status, trained

SHORT = ("data.train_samples=16", "data.val_samples=8", "trainer.max_epochs=1")


def test_two_members_are_two_runs(command, without_stage_2, tmp_path):
    typed = ("name=s", "seed=1,2")
    printed = trained("-m", *SHORT, *typed, cwd=tmp_path)
    folders = (tmp_path / "outputs/default/s").glob("*/")
    runs = {OmegaConf.load(folder / "config.yaml").seed: folder for folder in folders}
    assert sorted(runs) == [1, 2]
    assert sorted(losses(runs[1])) == [1, 2]
    # Nothing leaks from one to the next: the second one trains as it does alone.
    trained(*SHORT, "name=alone", "seed=2", cwd=tmp_path)
    assert losses(runs[2]) == losses(tmp_path / "outputs/default/alone")
    assert losses(runs[2]) != losses(runs[1])

    assert "page    outputs/default/s/compare.html" in printed
    table = printed[printed.rindex("overrides") :]
    for seed, run in runs.items():
        rows = [line for line in table.splitlines() if f"outputs/default/s/{run.name}" in line]
        (row,) = (line for line in rows if "report" not in line)
        accuracy = status(run)["metrics"]["val/acc1"]
        assert "succeeded" in row
        assert f"{100 * accuracy:.2f} %" in row
        assert f"seed={seed}" in row

    # Started again, in another order and under other circumstances, nothing is left to do.
    again = command("launcher.max_attempts=1", *TINY, *SHORT, *reversed(typed), "-m")
    assert again.code == 0
    assert again.out.count("succeeded before, skipped") == 2
    for run in runs.values():
        assert [attempt.name for attempt in (run / "attempts").iterdir()] == ["001"]


@pytest.fixture
def started(without_stage_2, monkeypatch):
    """The seeds of the runs whose process a sweep would start; the first one of seed 2 fails."""
    seeds = []
    states = {2: JobState.FAILED}

    def run_one(plan, turn):
        seeds.append(plan.config.seed)
        if not plan.run.exists:
            plan.run.create(OmegaConf.to_yaml(plan.recipe), {})
        state = states.pop(plan.config.seed, JobState.SUCCEEDED)
        record = {"run_id": plan.run_id, "where": {"task": {"_target_": "t"}, "launcher": {}}}
        plan.run.begin_attempt(record).end(state, metrics={"val/acc1": 0.5})
        return state

    monkeypatch.setattr(sweeps, "run_one", run_one)
    return seeds


def test_what_a_sweep_and_its_members_are_named_by(command, started, tmp_path):
    # Where it runs is not a part of what a member is; one that failed is started again.
    where = ("launcher.max_attempts=2", "trainer.devices=1")
    first = command("-m", "seed=1,2,3", "name=s")
    assert first.code == 1
    assert started == [1, 2, 3]
    assert "failed" in first.out
    assert command("-m", "seed=1,2,3,4", "name=s", *where).code == 0
    assert started[3:] == [2, 4]
    for typed in (["seed=1,3"], ["seed=1,3,4"], ["seed=1,3", "optimizer.lr=0.2"]):
        assert command("-m", *typed).code == 0
    assert started[5:] == [1, 3, 4, 1, 3]
    assert len(list((tmp_path / "outputs/default").iterdir())) == 1 + 2
    # One recipe on one and on two devices: two runs, though their config.yaml are the same.
    assert command("-m", "trainer.devices=1,2", "trainer.accelerator=cpu", "name=d").code == 0
    configs = [run / "config.yaml" for run in (tmp_path / "outputs/default/d").glob("*/")]
    assert len(configs) == 2
    assert len({config.read_text() for config in configs}) == 1


def test_one_bad_member_refuses_all(command, started, tmp_path):
    result = command("-m", "seed=1,x", "optimizer.lr=0.1,0.2,fast", "data.batch_size=nine")
    assert result.code == 2
    assert started == []
    assert list(tmp_path.iterdir()) == []
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
    assert "pending" in result.out
    assert signal.getsignal(number) is before
