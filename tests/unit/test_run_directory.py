"""A run's directory: what is written when, what it is worth, and which failure is the cause."""

from __future__ import annotations

import bdb
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import traceback
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from distdl.agent import agent
from distdl.config import own_code
from distdl.job import JobState, Resources
from distdl.launch import start
from distdl.runs import failures, provenance
from distdl.runs.directory import Attempt, RunDirectory, read_json, write_json
from distdl.util.errors import Damaged, UserError
from distdl.util.processes import start_time
from distdl.worker import failing

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


def test_provenance_has_the_state_of_git(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "experiments").mkdir()
    monkeypatch.chdir(tmp_path / "experiments")
    assert provenance.git_state(tmp_path) == {}
    assert provenance.project_root(None) == Path.cwd()
    git("init", "-b", "trunk")
    assert provenance.git_state(tmp_path)["error"] == "there is no commit yet"
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    git("add", "train.py")
    git("commit", "-m", "first")
    (tmp_path / "train.py").write_bytes("# Größe\nlr = 0.2\n".encode("latin-1"))
    (tmp_path / "new.py").write_text("")
    record = provenance.collect(["distdl", "data=imagenet"], tmp_path)
    assert record["command"] == ["distdl", "data=imagenet"]
    assert any(package.startswith("torch==") for package in record["packages"])
    state = record["git"]
    assert len(state["commit"]) == 40
    assert state["branch"] == "trunk"
    assert state["dirty"]
    assert state["changed"] == [" M train.py", "?? new.py"]
    assert "-lr = 0.1\n+# Gr\ufffd\ufffde\n+lr = 0.2" in state["diff"]
    for chosen, root in ((None, tmp_path), (".", Path.cwd()), ("..", tmp_path)):
        assert provenance.project_root(chosen) == root
    # The folder that a command is typed in comes first, if it is part of the project.
    folders = own_code.own_folders(tmp_path)
    assert own_code.python_path(tmp_path, folders) == ["experiments", "."]
    monkeypatch.setenv("PATH", "")  # without git
    (error,) = provenance.git_state(tmp_path).values()
    assert "git is not installed" in error


# What happens to an attempt, as functions that record it.


def failed(rank, time, **more):
    return lambda a: a.record_error(rank, "Error", "bad weather", "", time=time, **more)


def exits(codes):
    """What torch's agent knows: rank -> exit code and time, in complete seconds."""
    ends = {k: SimpleNamespace(exitcode=code, timestamp=at) for k, (code, at) in codes.items()}
    return lambda attempt: agent.record_kills(attempt, ends)


def platform_saw(rank, number, host):
    return lambda a: failures.record_first_end(a.errors, rank, -number, host)


def torn(attempt):
    """Records of another shape, of ranks that died while they wrote."""
    for number, text in enumerate(("{", "[1]", "{}", '{"rank": 1, "time": "x"}'), 3):
        (attempt.errors / f"rank_{number}.json").write_text(text)


KILL = signal.SIGKILL
SEGV = signal.SIGSEGV
TERM = signal.SIGTERM
CASES = [
    ([failed(1, 9.0), failed(2, 7.0), torn], 2, "bad weather"),
    ([failed(0, 2.0, enqueued=9), failed(1, 5.0, enqueued="few")], 0, "bad weather"),
    # Under srun: what rank 0 recorded before anybody looked follows from the kill.
    ([failed(0, 100.0), platform_saw(1, TERM, "n2")], 0, "bad weather"),
    # A crash may be a consequence.
    ([failed(0, 1.0), platform_saw(1, KILL, "n2"), platform_saw(2, SEGV, "n3")], 1, "KILL on n2"),
    ([failed(1, 100.7), exits({1: (1, 100), 0: (-SEGV, 100)})], 1, "bad weather"),
    ([failed(1, 100.7), exits({2: (3, 90)})], 2, "exit code 3 on"),
]


@pytest.fixture
def attempt(tmp_path) -> Attempt:
    return Attempt(tmp_path / "attempts/001")


@pytest.mark.parametrize(("events", "rank", "fragment"), CASES)
def test_the_cause(attempt, events, rank, fragment):
    for event in events:
        event(attempt)
    first = attempt.first_error()
    assert first["rank"] == rank
    assert fragment in failures.describe(first)


def test_what_came_first_in_a_chain_decides(attempt):
    def chained(first, second):
        second.__context__ = first
        return second

    mine = ValueError("bad weather")
    lost = RuntimeError("Connection closed by peer [127.0.0.1]")
    failing.record_failure(attempt, 0, chained(lost, RuntimeError("step 5 failed")))
    assert attempt.first_error()["lost_peer"]
    assert not failures.is_consequence(chained(mine, RuntimeError(str(lost))))
    # Hydra wraps what a constructor raises, and whoever unwraps it closes a ring.
    wrapped = chained(mine, RuntimeError("Error in call to target"))
    wrapped.__cause__ = mine
    mine.__context__ = wrapped
    assert not failures.is_consequence(mine)


def test_the_log_ends_with_the_line_of_the_users_code(attempt, tmp_path, monkeypatch, caplog):
    """Below it are frames of what they call; a loader's worker sends its traceback as text."""
    monkeypatch.chdir(tmp_path)
    code = "import ast\ndef training_step():\n    ast.literal_eval('1 +')\n"
    (tmp_path / "bad.py").write_text(code)
    bad = runpy.run_path(str(tmp_path / "bad.py"))
    with pytest.raises(SyntaxError) as raised:
        bad["training_step"]()
    sent = "".join(traceback.format_exception(raised.value))
    of_worker = RuntimeError(f"Caught SyntaxError in DataLoader worker process 0.\n{sent}")
    where = "at bad.py, line 3, in training_step"
    for rank, error in enumerate((raised.value, of_worker)):
        assert failing.record_failure(attempt, rank, error) == 1
        assert caplog.messages[-1].rstrip().endswith(where)
    shown = [failures.describe(error) for error in failures.recorded(attempt.errors)]
    assert len(shown) == 2
    assert all(text.endswith(f"({where})") for text in shown)


def test_the_command_to_type_after_a_failure(run, tmp_path, monkeypatch, capsys, caplog):
    """A resume only where there is a checkpoint, and none after a `q` in a debugger."""
    monkeypatch.chdir(tmp_path)
    newest = run.begin_attempt({**LAUNCH, "where": {"launcher": {}}, "changes": {}})
    newest.end(JobState.FAILED)
    config = OmegaConf.create({"task": {"_target_": "distdl.tasks.train"}})
    failure = SimpleNamespace(run=run, config=config), newest, JobState.FAILED
    for command in ("seed=1 name=r", "resume outputs/e/r"):
        start.print_next_command(*failure, ["distdl", "seed=1", "name=r"])
        assert capsys.readouterr().out.endswith(f":\n  python -m distdl {command}\n")
        (run.checkpoints / "epoch_000.manifest.json").mkdir(parents=True, exist_ok=True)
    assert failing.record_failure(newest, 0, bdb.BdbQuit()) == 1
    shown = [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    assert shown == ["ended in the debugger"] == [failures.describe(newest.first_error())]
    start.print_next_command(*failure, [])
    assert not capsys.readouterr().out
