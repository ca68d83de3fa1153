"""A run's directory: what is written when, and what the state on record is worth."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from distdl.job import JobState, Resources
from distdl.launch import start
from distdl.ranks.stopping import Ended
from distdl.runs import attempt as attempts
from distdl.runs import directory
from distdl.runs.directory import RunDirectory, read_json, write_json
from distdl.runs.files import Damaged
from distdl.util.errors import UserError
from distdl.util.processes import is_alive, start_time

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


def test_what_lies_where_and_the_config_comes_last(tmp_path, monkeypatch) -> None:
    """With config.yaml the run exists, so everything else must be there by then."""
    order, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(Path(b).name), replace(a, b)))
    run = RunDirectory(tmp_path / "outputs/e/r")
    assert not run.exists
    run.create("seed: 1\n", {})
    assert run.exists and order == (created := ["provenance.json", "config.yaml"])
    attempt = run.begin_attempt(LAUNCH)
    files = {str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file()}
    assert files == {*created, "attempts/001/launch.yaml", "attempts/001/status.json"}
    assert (run.recipe().seed, attempt.resources()) == (1, Resources(1, 2, "cpu"))
    assert attempt.status()["state"] == "PENDING"
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.open("outputs/e/r").path == run.path
    with pytest.raises(UserError, match="nowhere"):
        RunDirectory.open("nowhere")


def test_a_crash_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch) -> None:
    path = tmp_path / "status.json"
    assert read_json(path) == {}
    write_json(path, {"state": "RUNNING"})

    def power_cut(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(OSError, match="no space"):
        write_json(path, {"state": "SUCCEEDED"})
    assert read_json(path) == {"state": "RUNNING"}
    path.write_text('{"state": "RUN')
    assert read_json(path) == {}


def test_attempts_are_counted_and_states_are_those_that_were_written(run) -> None:
    numbers = []
    for state in 4 * [JobState.FAILED, JobState.SUCCEEDED, JobState.PREEMPTED]:
        expected = run.next_attempt()
        attempt = run.begin_attempt(LAUNCH)
        assert attempt == expected
        attempt.begin()
        assert attempt.state() is JobState.RUNNING
        attempt.end(state, metrics={"a": 1.0})
        status = attempt.status()
        assert attempt.state() is state and status["exit_code"] == state.exit_code
        assert status["ended"] >= status["started"] and status["pid"] == os.getpid()
        numbers.append(attempt.number)
    assert numbers == list(range(1, 13)) == [a.number for a in run.attempts()]
    assert run.last_attempt().number == 12
    # Whatever lies there keeps its number.
    (run.path / "attempts/013").mkdir()
    assert run.begin_attempt(LAUNCH).number == 14


def test_an_update_keeps_the_rest_and_what_changes_nothing_writes_nothing(run, monkeypatch) -> None:
    attempt = run.begin_attempt(LAUNCH)
    attempt.update(a=1)
    attempt.update(b=2)
    stored = json.loads((attempt.path / "status.json").read_text())
    assert (stored["a"], stored["b"], stored["state"]) == (1, 2, "PENDING")
    written = []
    monkeypatch.setattr(attempts, "write_json", lambda *_: written.append(1))
    attempt.update(a=1, b=2)
    assert not written
    for code in (None, 7):  # however much is put on record at an end
        attempt.record_error(0, "ValueError", "the cause", "", exit_code=7)
        attempt.conclude(JobState.FAILED, code)
    attempt.fail("the cause", 7)
    assert len(written) == 3


BEGUN, WAITING, BLOCKS, GONE = True, False, True, False


@pytest.mark.parametrize(
    ("begun", "changes", "blocks"),
    [
        (WAITING, {"pid": "ended"}, GONE),
        (BEGUN, {"pid": "ended"}, GONE),
        # A process that lives, and has not begun yet; an older record knows no birth.
        (WAITING, {"pid": 1, "birth": None}, BLOCKS),
        (BEGUN, {}, BLOCKS),
        # Nobody can tell from here.
        (WAITING, {"host": "elsewhere", "pid": 3}, BLOCKS),
        (BEGUN, {"host": "elsewhere", "pid": "ended"}, BLOCKS),
        # The number belongs to another process by now, also after a reboot.
        (BEGUN, {"birth": "0-another-boot/17"}, GONE),
        (BEGUN, {"birth": start_time(1)}, GONE),
        (BEGUN, {"birth": start_time(os.getpid())}, BLOCKS),
    ],
)
def test_a_run_is_not_started_again_while_it_runs(run, ended, begun, changes, blocks) -> None:
    attempt = run.begin_attempt(LAUNCH)
    if begun:
        attempt.begin()
    attempt.update(**{k: ended if v == "ended" else v for k, v in changes.items()})
    if not blocks:
        assert attempt.state() is JobState.FAILED and run.begin_attempt(LAUNCH).number == 2
        return
    with pytest.raises(UserError, match="attempt 1 is running") as refused:
        run.begin_attempt(LAUNCH)
    assert "start a run with another name" in refused.value.problems[0].remedy
    if "host" in changes:
        assert "on elsewhere" in str(refused.value) and "if it is gone: rm " in str(refused.value)
    (attempt.path / "status.json").unlink()
    assert run.begin_attempt(LAUNCH).number == 2


PAIRS = 60


def _start(folder: str, barrier, answers) -> None:
    for number in range(PAIRS):
        barrier.wait()
        try:
            begun = RunDirectory(Path(folder, str(number))).begin_attempt(LAUNCH).number
        except UserError:
            begun = None
        answers.put((number, begun))
        barrier.wait()  # both live until both have tried


def test_of_two_starts_at_once_one_begins(tmp_path) -> None:
    for number in range(PAIRS):
        RunDirectory(tmp_path / str(number)).create("seed: 1\n", {})
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(2), context.Queue()
    both = [context.Process(target=_start, args=(tmp_path, barrier, answers)) for _ in range(2)]
    for process in both:
        process.start()
    begun: dict[int, list[int | None]] = {}
    for _ in range(2 * PAIRS):
        number, attempt = answers.get(timeout=60)
        begun.setdefault(number, []).append(attempt)
    for process in both:
        process.join(60)
    assert [n for n, pair in begun.items() if sorted(pair, key=str) != [1, None]] == []
    assert not list(tmp_path.glob("*/attempts/.*")), "what was prepared in vain is gone"


def test_a_signal_in_the_very_moment_of_the_start_is_on_record(run, monkeypatch) -> None:
    """The attempt has appeared, and nobody stays with it yet."""
    rename = os.rename

    def signalled(source, target) -> None:
        rename(source, target)
        raise Ended(signal.SIGUSR1)

    monkeypatch.setattr(directory.os, "rename", signalled)
    planned = SimpleNamespace(run=run)
    with pytest.raises(Ended), start.interruption_recorded(planned):  # type: ignore[arg-type]
        run.begin_attempt(LAUNCH)
    (attempt,) = run.attempts()
    assert (attempt.state(), attempt.status()["exit_code"]) == (JobState.PREEMPTED, 75)


DAMAGE = {
    "": "it is empty",
    '{"state": "RUN': "it is not JSON",
    "[1, 2]": "it holds a list, and no mapping",
    '{"state": "BANANA"}': "state is 'BANANA'",
    '{"state": {"a": 1}}': "state is ",
    '{"state": "RUNNING", "pid": "many"}': "pid is 'many'",
    '{"state": "SUCCEEDED", "metrics": {"val/acc1": "good"}}': "metrics.val/acc1 is 'good'",
}


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_status_is_reported_and_never_believed(run, text) -> None:
    attempt = run.begin_attempt(LAUNCH)
    path = attempt.path / "status.json"
    path.write_text(text)
    for ask in (attempt.state, attempt.status, lambda: run.begin_attempt(LAUNCH)):
        with pytest.raises(Damaged) as refused:
            ask()
        (problem,) = refused.value.problems
        assert problem.path == str(path) and DAMAGE[text] in problem.what
        assert f"rm {path}" in problem.remedy
    # The run itself goes on, and what the file said stays beside it.
    attempt.begin()
    assert attempt.state() is JobState.RUNNING
    assert (attempt.path / "status.json.damaged").read_text() == text


def test_half_of_a_frozen_file_is_no_file(run) -> None:
    """Half of a YAML file is mostly one as well."""
    attempt = run.begin_attempt({**LAUNCH, "changes": {"trainer.max_epochs": 9}})
    start, config = attempt.path / "launch.yaml", run.path / "config.yaml"
    config.write_text("a: 1\nb: 2\n")
    for path, ask in ((start, attempt.launch), (config, run.recipe)):
        text = path.read_text()
        for cut in range(len(text)):
            path.write_text(text[:cut])
            with pytest.raises(Damaged, match=r"is damaged: .*\n.*restore it"):
                ask()
    wrong = {"- 1\n": "a list", "where: [1]\nrun_id: a\n": "where is '", ": [": "no Y"}
    for text, what in wrong.items():
        start.write_text(text)
        with pytest.raises(Damaged, match=what):
            attempt.launch()


def test_files_from_before_the_checksums_are_read(run) -> None:
    write_json(run.path / "provenance.json", {"command": ["distdl"]})
    old = "seed: 1\nmodel: {a: 1e-3}\ntrainer: {}\ntracking: {}\ncallbacks: null\n"
    (run.path / "config.yaml").write_text(old)
    assert run.recipe().model.a == 0.001
    (run.path / "config.yaml").write_text(old[: old.index("trainer")])
    with pytest.raises(Damaged, match="it lacks trainer, callbacks"):
        run.recipe()
    attempt = run.begin_attempt(LAUNCH)
    path = attempt.path / "launch.yaml"
    path.write_text(path.read_text().partition("\n")[2])
    assert attempt.launch() == LAUNCH


def test_a_zombie_has_ended() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet waited for
    assert not is_alive(process.pid)
    process.wait()
    assert is_alive(os.getpid()) and is_alive(1) and not is_alive(2**40)
