"""A run's directory: what is written when, and what the state on record is worth."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest

from distdl import run_directory
from distdl.errors import UserError
from distdl.job import JobState, Resources
from distdl.run_directory import RunDirectory, is_alive, read_json, write_json

LAUNCH = {
    "run_id": "e/r",
    "where": {},
    "resources": {"num_nodes": 1, "devices": 2, "accelerator": "cpu", "device_ids": None},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create("seed: 1\n", {"command": ["distdl"]})
    return run


@pytest.fixture
def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_lies_where(run) -> None:
    attempt = run.begin_attempt(LAUNCH)
    found = {str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file()}
    assert found == {
        "config.yaml",
        "provenance.json",
        "attempts/001/launch.yaml",
        "attempts/001/status.json",
    }
    assert run.recipe().seed == 1
    assert attempt.resources() == Resources(1, 2, "cpu")
    assert attempt.status()["state"] == "PENDING"


def test_the_config_comes_last(tmp_path, monkeypatch) -> None:
    """With config.yaml the run exists, so everything else must be there by then."""
    order = []
    replace = os.replace
    monkeypatch.setattr(
        run_directory.os, "replace", lambda a, b: (order.append(Path(b).name), replace(a, b))
    )
    run = RunDirectory(tmp_path / "r")
    assert not run.exists
    run.create("seed: 1\n", {})
    assert run.exists and order[-1] == "config.yaml"


def test_a_crash_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"state": "RUNNING"})

    def power_cut(*_):
        raise OSError("no space left")

    monkeypatch.setattr(run_directory.os, "replace", power_cut)
    with pytest.raises(OSError, match="no space"):
        write_json(path, {"state": "SUCCEEDED"})
    assert read_json(path) == {"state": "RUNNING"}


def test_torn_or_absent_is_empty(tmp_path) -> None:
    assert read_json(tmp_path / "absent") == {}
    (tmp_path / "torn").write_text('{"state": "RUN')
    assert read_json(tmp_path / "torn") == {}


def test_attempts_are_counted_and_never_shared(run, monkeypatch) -> None:
    numbers = []
    for _ in range(11):
        attempt = run.begin_attempt(LAUNCH)
        attempt.end(JobState.FAILED)
        numbers.append(attempt.number)
    assert numbers == list(range(1, 12)) == [a.number for a in run.attempts()]
    assert run.last_attempt().number == 11
    # Another start has just made the folder of the twelfth.
    (run.path / "attempts/012").mkdir()
    with pytest.raises(UserError, match="another start is under way"):
        run.begin_attempt(LAUNCH)


def test_states_are_those_that_were_written(run) -> None:
    attempt = run.begin_attempt(LAUNCH)
    attempt.begin()
    assert attempt.state() is JobState.RUNNING
    for state in (JobState.SUCCEEDED, JobState.PREEMPTED, JobState.FAILED):
        attempt.end(state, metrics={"a": 1.0})
        status = attempt.status()
        assert attempt.state() is state and status["exit_code"] == state.exit_code
        assert status["ended"] >= status["started"] and status["pid"] == os.getpid()


def test_running_with_a_process_that_is_gone_has_failed(run, ended) -> None:
    attempt = run.begin_attempt(LAUNCH)
    attempt.begin()
    attempt.update(pid=ended)
    assert attempt.state() is JobState.FAILED
    assert run.begin_attempt(LAUNCH).number == 2


def test_a_run_that_runs_is_not_started_again(run, ended) -> None:
    attempt = run.begin_attempt(LAUNCH)
    attempt.update(pid=1)  # a process that lives, and has not come to begin() yet
    with pytest.raises(UserError, match="attempt 1 is running"):
        run.begin_attempt(LAUNCH)
    attempt.begin()
    with pytest.raises(UserError, match="start a run with another name"):
        run.begin_attempt(LAUNCH)
    attempt.begin()
    attempt.update(host="elsewhere", pid=ended)  # nobody can tell from here
    with pytest.raises(UserError, match=r"on elsewhere.*\n.*if it is gone: rm .*status"):
        run.begin_attempt(LAUNCH)
    (attempt.path / "status.json").unlink()
    assert run.begin_attempt(LAUNCH).number == 2


def test_a_start_that_died_before_its_worker_does_not_block(run, ended) -> None:
    run.begin_attempt(LAUNCH).update(pid=ended)
    assert run.begin_attempt(LAUNCH).number == 2


def _start(path: str, barrier, answers) -> None:
    barrier.wait()
    try:
        answers.put(RunDirectory(Path(path)).begin_attempt(LAUNCH).number)
    except UserError:
        answers.put(None)
    barrier.wait()  # both live until both have tried


def test_two_starts_at_once_make_one_attempt(run) -> None:
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(2), context.Queue()
    both = [context.Process(target=_start, args=(run.path, barrier, answers)) for _ in range(2)]
    for process in both:
        process.start()
    assert sorted([answers.get(timeout=30), answers.get(timeout=30)], key=str) == [1, None]
    for process in both:
        process.join(30)


def test_the_first_failure_is_named(run) -> None:
    attempt = run.begin_attempt(LAUNCH)
    assert attempt.first_error() is None
    attempt.record_error(1, "ValueError", "the cause", "Traceback ...")
    attempt.record_error(0, "RuntimeError", "connection closed by peer", "Traceback ...")
    (attempt.path / "errors/rank_2.json").write_text("{")  # a rank that died while it wrote
    first = attempt.first_error()
    assert (first["rank"], first["type"], first["message"]) == (1, "ValueError", "the cause")


def test_opening_what_is_no_run(tmp_path, run, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.open("outputs/e/r").path == run.path
    with pytest.raises(UserError, match="nowhere"):
        RunDirectory.open("nowhere")


def test_a_zombie_has_ended() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet waited for
    assert not is_alive(process.pid)
    process.wait()
    assert is_alive(os.getpid()) and is_alive(1) and not is_alive(2**40)


def test_nothing_is_lost_by_updating(run) -> None:
    attempt = run.begin_attempt(LAUNCH)
    attempt.update(a=1)
    attempt.update(b=2)
    stored = json.loads((attempt.path / "status.json").read_text())
    assert (stored["a"], stored["b"], stored["state"]) == (1, 2, "PENDING")
