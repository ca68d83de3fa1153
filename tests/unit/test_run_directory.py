"""A run's directory: what is written when, and what the recorded state is worth."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distdl.config import own_code
from distdl.job import JobState, Resources
from distdl.launch import start
from distdl.ranks.stopping import Ended
from distdl.runs import attempt as attempts
from distdl.runs import provenance
from distdl.runs.directory import RunDirectory, read_json, write_json
from distdl.runs.files import Damaged
from distdl.util.errors import UserError
from distdl.util.processes import is_alive, start_time

SIZE = {"num_nodes": 1, "devices": 2, "accelerator": "cpu", "device_ids": None}
LAUNCH = {"run_id": "e/r", "where": {}, "resources": SIZE}
CANARY = "canary-0d9f61e2"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create("seed: 1\n", {"command": ["distdl"]})
    return run


def test_config_comes_last_and_an_attempt_appears_complete(tmp_path, monkeypatch) -> None:
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


def test_attempts_are_counted_and_keep_their_task_and_state(run) -> None:
    tasks = ({}, {"task": {"checkpoint": "best"}}, {"task": {"_target_": "a.B"}})
    states = (JobState.FAILED, JobState.SUCCEEDED, JobState.PREEMPTED)
    for number, (state, where) in enumerate(3 * [*zip(states, tasks, strict=True)], 1):
        expected = run.next_attempt()
        attempt = run.begin_attempt({**LAUNCH, "where": where})
        assert attempt == expected and attempt.number == number
        assert attempt.task == ("a.B" if number % 3 == 0 else "")
        attempt.begin()
        assert attempt.state() is JobState.RUNNING
        attempt.end(state, metrics={"a": 1.0})
        status = attempt.status()
        assert attempt.state() is state and status["exit_code"] == state.exit_code
        assert status["ended"] >= status["started"] and status["pid"] == os.getpid()
    (run.path / "attempts/010").mkdir()  # any folder keeps its number
    assert [a.number for a in run.attempts()] == list(range(1, 10))
    assert run.begin_attempt(LAUNCH).number == run.last_attempt().number == 11


def test_an_update_keeps_the_rest_and_no_change_writes_nothing(run, monkeypatch) -> None:
    attempt = run.begin_attempt(LAUNCH)
    attempt.update(a=1)
    with monkeypatch.context() as crash, pytest.raises(ZeroDivisionError):
        crash.setattr(os, "replace", lambda *_: 1 / 0)
        attempt.update(b=0)
    attempt.update(b=2)
    stored = read_json(attempt.path / "status.json")
    assert (stored["a"], stored["b"], stored["state"]) == (1, 2, "PENDING")
    written: list[Any] = []
    monkeypatch.setattr(attempts, "write_json", lambda *_: written.append(1))
    attempt.update(a=1, b=2)
    assert not written
    for code in (None, 7):  # however much is recorded at an end
        attempt.record_error(0, "ValueError", "the cause", "", exit_code=7)
        attempt.conclude(JobState.FAILED, code)
    attempt.fail("the cause", 7)
    assert len(written) == 3


@pytest.mark.parametrize(
    ("begun", "changes", "blocks"),
    [
        (False, {"pid": "ended"}, False),
        (True, {"pid": "ended"}, False),
        # A process that lives, and has not begun yet; an older record has no start time.
        (False, {"pid": 1, "birth": None}, True),
        (True, {}, True),
        # Nobody can tell from here.
        (False, {"host": "elsewhere", "pid": 3}, True),
        (True, {"host": "elsewhere", "pid": "ended"}, True),
        # The number belongs to another process by now, also after a reboot.
        (True, {"birth": "0-another-boot/17"}, False),
        (True, {"birth": start_time(1)}, False),
        (True, {"birth": start_time(os.getpid())}, True),
    ],
)
def test_a_run_is_not_started_again_while_it_runs(run, begun, changes, blocks) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    attempt = run.begin_attempt(LAUNCH)
    if begun:
        attempt.begin()
    attempt.update(**{k: ended.pid if v == "ended" else v for k, v in changes.items()})
    if blocks:
        with pytest.raises(UserError, match="attempt 1 is running") as error:
            run.begin_attempt(LAUNCH)
        assert ("; if it is gone: rm " in error.value.problems[0].remedy) == ("host" in changes)
        (attempt.path / "status.json").unlink()
    else:
        assert attempt.state() is JobState.FAILED
    assert run.begin_attempt(LAUNCH).number == 2


PAIRS = 40


def begin_all(folder: str, barrier, answers) -> None:
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
    shared = tmp_path, context.Barrier(2), (answers := context.Queue())
    both = [context.Process(target=begin_all, args=shared) for _ in range(2)]
    for process in both:
        process.start()
    results = sorted((answers.get(timeout=60) for _ in range(2 * PAIRS)), key=str)
    for process in both:
        process.join(60)
    assert results == sorted([(n, one) for n in range(PAIRS) for one in (1, None)], key=str)
    assert not list(tmp_path.glob("*/attempts/.*")), "what was prepared in vain is gone"


def test_a_signal_at_the_moment_of_the_start_is_recorded(run, monkeypatch) -> None:
    """The attempt has appeared, and no process belongs to it yet."""
    rename = os.rename

    def signalled(source, target) -> None:
        rename(source, target)
        raise Ended(signal.SIGUSR1)

    monkeypatch.setattr(os, "rename", signalled)
    planned: Any = SimpleNamespace(run=run)
    with pytest.raises(Ended), start.interruption_recorded(planned):
        run.begin_attempt(LAUNCH)
    (attempt,) = run.attempts()
    assert (attempt.state(), attempt.status()["exit_code"]) == (JobState.PREEMPTED, 75)


DAMAGE = {
    "": "it is empty",
    '{"state": "RUN': "it is not JSON",
    "[1, 2]": "it holds a list",
    '{"state": "BANANA"}': "state is 'BANANA'",
    '{"state": "RUNNING", "pid": "many"}': "pid is 'many'",
    '{"state": "SUCCEEDED", "metrics": {"val/acc1": "good"}}': "metrics.val/acc1 is 'good'",
}


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_status_is_reported_and_never_believed(run, text) -> None:
    attempt = run.begin_attempt(LAUNCH)
    path = attempt.path / "status.json"
    path.write_text(text)
    for ask in (attempt.state, attempt.status, lambda: run.begin_attempt(LAUNCH)):
        with pytest.raises(Damaged, match=DAMAGE[text]) as error:
            ask()
        (problem,) = error.value.problems
        assert problem.path == str(path) and f"rm {path}" in problem.remedy
    attempt.begin()  # the run itself continues, and the file's contents stay beside it
    assert attempt.state() is JobState.RUNNING
    assert (attempt.path / "status.json.damaged").read_text() == text


def test_half_of_a_frozen_file_is_not_a_file(run) -> None:
    """Half of a YAML file is mostly YAML as well."""
    attempt = run.begin_attempt({**LAUNCH, "changes": {"trainer.max_epochs": 9}})
    launch, config = attempt.path / "launch.yaml", run.path / "config.yaml"
    config.write_text("a: 1\nb: 2\n")
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


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One commit, and then one changed and one new file."""

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "trunk")
    assert provenance.git_state(tmp_path) == {}, "there is no commit yet"
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    git("add", "train.py")
    git("commit", "-m", "first")
    (tmp_path / "train.py").write_text(f'lr = 0.2\napi_key = "{CANARY}"\n')
    (tmp_path / "new.py").write_text("")
    return tmp_path


def test_provenance_has_the_state_of_git_and_no_secret(repository, monkeypatch) -> None:
    monkeypatch.setenv("SAMPLE_TOKEN", CANARY)
    monkeypatch.setenv("HARMLESS_LOOKING", "value-of-the-environment")
    command = ["distdl", "data=imagenet", f"+model.api_token={CANARY}", f"name=x{CANARY}"]
    record = provenance.collect(command, repository)
    text = json.dumps(record)
    assert CANARY not in text and "value-of-the-environment" not in text
    assert record["command"][1] == "data=imagenet"
    assert any(package.startswith("torch==") for package in record["packages"])
    assert {"created", "distdl", "python", "platform"} <= set(record)
    state = record["git"]
    assert len(state["commit"]) == 40 and state["branch"] == "trunk"
    assert state["dirty"] and set(state["changed"]) == {" M train.py", "?? new.py"}
    assert "-lr = 0.1\n+lr = 0.2" in state["diff"] and "api_key" in state["diff"]
    (repository / "train.py").write_bytes("# Größe\nlr = 0.3\n".encode("latin-1"))  # not UTF-8
    state = provenance.git_state(repository)
    assert "+lr = 0.3" in state["diff"] and "# Gr\ufffd\ufffde" in state["diff"]
    json.dumps(state).encode("ascii")
    monkeypatch.setattr(provenance, "DIFF_LIMIT", 100)
    diff = provenance.git_state(repository)["diff"]
    assert diff.endswith("[cut here]\n") and len(diff) < 130


@pytest.mark.parametrize("installed", [True, False])
def test_without_git(tmp_path, monkeypatch, installed: bool) -> None:
    if not installed:
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert provenance.git_state(tmp_path) == {} and provenance.project_root(None) == tmp_path


def test_the_users_code(repository, monkeypatch) -> None:
    inner = repository / "experiments"
    inner.mkdir()
    monkeypatch.chdir(inner)
    for chosen, root in ((None, repository), (str(inner), inner), ("..", repository)):
        assert provenance.project_root(chosen) == root
    # The folder that a command is typed in comes first, if it is part of the project.
    assert own_code.python_path(repository) == ["experiments", "."]
