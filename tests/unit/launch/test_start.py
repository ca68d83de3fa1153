"""What a start prints when its attempt has ended."""

from __future__ import annotations

import bdb
import logging
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from distdl.config import compose
from distdl.job import JobState
from distdl.launch import answers, planning, start, submitting
from distdl.runs import failures
from distdl.runs.directory import RunDirectory
from distdl.util.errors import Problem, UserError
from distdl.worker import failing
from tests.conftest import TINY

SIZE = {"num_nodes": 1, "devices": 2, "accelerator": "cpu", "device_ids": None}
LAUNCH = {"run_id": "e/r", "where": {}, "resources": SIZE}


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create("seed: 1\n", {"command": ["distdl"]})
    return run


def test_the_command_to_type_after_a_failure(run, tmp_path, monkeypatch, capsys, caplog):
    """A resume only where there is a checkpoint, and none after a `q` in a debugger."""
    monkeypatch.chdir(tmp_path)
    newest = run.begin_attempt({**LAUNCH, "where": {"launcher": {}}, "changes": {}})
    newest.end(JobState.FAILED)
    config = OmegaConf.create({"task": {"_target_": "distdl.tasks.train"}})
    planned = planning.Plan(SimpleNamespace(config=config, typed=()), config, run, "e/r")
    failure = planned, newest, JobState.FAILED
    for command in ("seed=1 name=r", "resume outputs/e/r"):
        start.print_next_command(*failure, ["distdl", "seed=1", "name=r"])
        assert capsys.readouterr().out.endswith(f":\n  python -m distdl {command}\n")
        (run.checkpoints / "epoch_000.manifest.json").mkdir(parents=True, exist_ok=True)
    assert failing.record_failure(newest, 0, bdb.BdbQuit()) == 1
    shown = [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    assert shown == ["ended in the debugger"] == [failures.describe(newest.first_error())]
    start.print_next_command(*failure, [])
    assert not capsys.readouterr().out


def test_a_refusal_of_a_rank_keeps_its_codes(run):
    newest = run.begin_attempt({**LAUNCH, "where": {"launcher": {}}, "changes": {}})
    first = Problem("strategy.stages", what="is 3", remedy="write 2", code="out-of-range")
    second = Problem("", what=f"a secret: password={2 * 'hunter2'}", code="private")
    assert failing.fail(newest, 0, UserError(first, second)) == 2
    error = newest.first_error()
    kept = failures.problems(error)
    assert kept[0].shown() == "strategy.stages: is 3 [out-of-range]\n    write 2"
    assert kept[1].shown() == "a secret: password=*** [private]"
    rank = answers.failure_of(newest, None)
    assert (rank.cause, rank.message) == ("out-of-range", "strategy.stages: is 3")
    assert rank.remedy == "write 2"
    # What no rank has written says nothing.
    for damaged in (None, {}, [1], [{"path": "x"}], [{**first.record(), "code": 2}]):
        assert failures.problems({**error, "problems": damaged}) == []
    assert failures.problems({**error, "exit_code": 1}) == []


def test_the_next_start_keeps_what_the_last_one_has_measured(tmp_path, monkeypatch):
    """Else `data.order=auto` could choose another order inside an epoch."""
    monkeypatch.chdir(tmp_path)
    words = ("launcher.max_attempts=2", "name=r", "model.compile=measured")
    planned = planning.plan(compose.compose([*TINY, *words]))
    chosen = {"model.compile": "default"}
    states = iter([JobState.FAILED, JobState.FAILED, JobState.SUCCEEDED])
    seen = []

    def submit(fitted, command):
        attempt = submitting.create_attempt(fitted, command, None)
        seen.append(attempt.launch()["changes"])
        if len(seen) == 1:
            attempt.write_launch({**attempt.launch(), "chosen": {"compile": chosen}})
        return attempt, SimpleNamespace(preempted_here=False)

    def wait(job, attempt, planned):
        state = next(states)
        attempt.end(state)
        return state

    monkeypatch.setattr(submitting, "submit", submit)
    monkeypatch.setattr(start, "wait_or_follow", wait)
    assert start.start(planned, ["distdl"]) == 0
    assert seen == [{}, chosen, chosen]
