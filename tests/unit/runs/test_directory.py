"""A run's directory: what is written when, and what it is worth."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from distdl.job import JobState, Resources
from distdl.runs.directory import RunDirectory, read_json, write_json
from distdl.util.errors import Damaged, UserError
from distdl.util.processes import start_time

SIZE = {"num_nodes": 1, "devices": 2, "accelerator": "cpu", "device_ids": None}


LAUNCH = {"run_id": "e/r", "where": {}, "resources": SIZE}


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create("seed: 1\n", {"command": ["distdl"]})
    return run


def test_config_comes_last_and_an_attempt_appears_complete(tmp_path, monkeypatch):
    """With config.yaml the run exists, so everything else must be there by then."""
    order = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(Path(b).name), replace(a, b)))
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create("seed: 1\n", {})
    created = ["provenance.json", "config.yaml"]
    assert order == created
    attempt = run.begin_attempt(LAUNCH)
    files = {str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file()}
    assert files == {*created, "attempts/001/launch.yaml", "attempts/001/status.json"}
    assert (run.recipe().seed, attempt.resources()) == (1, Resources(1, 2, "cpu"))


def test_what_was_typed(tmp_path):
    run = RunDirectory(tmp_path / "r")
    words = ["++checkpoint.monitor=a=b", "seed=1"]
    run.create("seed: 1\n", {"overrides": words, "swept": ["lr=1"]})
    assert run.typed_keys(LAUNCH) == {"checkpoint.monitor", "seed", "lr"}
    changed = {**LAUNCH, "changes": {"checkpoint.mode": "min"}}
    assert run.typed_keys(changed) == {"checkpoint.monitor", "seed", "lr", "checkpoint.mode"}


def test_any_folder_keeps_its_number(run):
    (run.path / "attempts/010").mkdir(parents=True)
    assert run.begin_attempt(LAUNCH).number == run.last_attempt().number == 11


def test_a_crash_in_an_update_keeps_what_was_recorded(run, monkeypatch):
    attempt = run.begin_attempt(LAUNCH)
    attempt.update(a=1)
    with monkeypatch.context() as crash, pytest.raises(ZeroDivisionError):
        crash.setattr(os, "replace", lambda *_: 1 / 0)
        attempt.update(b=0)
    attempt.update(b=2)
    stored = read_json(attempt.path / "status.json")
    assert (stored["a"], stored["b"], stored["state"]) == (1, 2, "PENDING")


@pytest.mark.parametrize(
    ("begun", "changes", "blocks"),
    [
        (False, {"pid": "zombie", "birth": None}, False),
        (True, {"pid": "zombie", "birth": None}, False),
        (True, {"pid": 2**40}, False),
        # A process that lives, and has not begun yet; an older record has no start time.
        (False, {"pid": 1, "birth": None}, True),
        (True, {}, True),
        # What no date can show.
        (True, {"started": 1e300}, True),
        # Nobody can tell from here.
        (True, {"host": "elsewhere", "pid": "zombie"}, True),
        # The number belongs to another process by now, also after a reboot.
        (True, {"birth": "0-another-boot/17"}, False),
        (True, {"birth": start_time(1)}, False),
    ],
)
def test_a_run_is_not_started_again_while_it_runs(run, begun, changes, blocks):
    attempt = run.begin_attempt(LAUNCH)
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # and is not yet waited for
        if begun:
            attempt.begin()
        attempt.update(**{k: ended.pid if v == "zombie" else v for k, v in changes.items()})
        if blocks:
            with pytest.raises(UserError, match="attempt 1 is running") as error:
                run.begin_attempt(LAUNCH)
            assert (
                "that it is gone: python -m distdl jobs ended" in error.value.problems[0].remedy
            ) == ("host" in changes)
            (attempt.path / "status.json").unlink()
        else:
            assert attempt.state() is JobState.FAILED
        assert run.begin_attempt(LAUNCH).number == 2


PAIRS = 40


def begin_all(folder: str, barrier, answers) -> None:
    for number in range(PAIRS):
        barrier.wait()
        with suppress(UserError):
            RunDirectory(Path(folder, str(number))).begin_attempt(LAUNCH)
            answers.put(number)
        barrier.wait()  # both live until both have tried


def test_of_two_starts_at_once_one_begins(tmp_path):
    for number in range(PAIRS):
        RunDirectory(tmp_path / str(number)).create("seed: 1\n", {})
    context = multiprocessing.get_context("fork")
    shared = tmp_path, context.Barrier(2), (answers := context.Queue())
    both = [context.Process(target=begin_all, args=shared) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    begun = sorted(answers.get(timeout=1) for _ in range(PAIRS))
    assert begun == list(range(PAIRS))
    assert answers.empty()
    assert not list(tmp_path.glob("*/attempts/.*")), "what was prepared in vain is gone"


DAMAGE = {
    "": "it is empty",
    '{"state": "RUN': "it is not JSON",
    "[1, 2]": "it holds a list",
    '{"state": "BANANA"}': "state is 'BANANA'",
    '{"state": "RUNNING", "pid": "many"}': "pid is 'many'",
    '{"state": "SUCCEEDED", "metrics": {"val/acc1": "good"}}': "metrics.val/acc1 is 'good'",
}


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_status_is_reported_and_never_believed(run, text):
    attempt = run.begin_attempt(LAUNCH)
    path = attempt.path / "status.json"
    path.write_text(text)
    for ask in (attempt.state, lambda: run.begin_attempt(LAUNCH)):
        with pytest.raises(Damaged, match=DAMAGE[text]) as error:
            ask()
        (problem,) = error.value.problems
        assert problem.path == str(path)
        assert f"rm {path}" in problem.remedy
    attempt.begin()  # the run itself continues, and the file's contents stay beside it
    assert attempt.state() is JobState.RUNNING
    assert (attempt.path / "status.json.damaged").read_text() == text


def test_half_of_a_frozen_file_is_not_a_file(run):
    """Half of a YAML file is mostly YAML as well."""
    attempt = run.begin_attempt({**LAUNCH, "changes": {"trainer.max_epochs": 9}})
    launch, config = attempt.path / "launch.yaml", run.path / "config.yaml"
    for path, ask in ((launch, attempt.launch), (config, run.recipe)):
        text = path.read_text()
        for cut in range(len(text)):
            path.write_text(text[:cut])
            with pytest.raises(Damaged):
                ask()
    wrong = (("- 1\n", "a list"), ("where: [1]\nrun_id: a\n", "where is '"), (": [", "YAML"))
    for text, what in wrong:
        launch.write_text(text)
        with pytest.raises(Damaged, match=what):
            attempt.launch()
    # A run from before the checksums.
    write_json(run.path / "provenance.json", {"command": ["distdl"]})
    config.write_text("seed: 1\nmodel: {a: 1e-3}\n")
    with pytest.raises(Damaged, match="it lacks trainer, callbacks"):
        run.recipe()
