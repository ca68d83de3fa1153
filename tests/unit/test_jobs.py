"""What the place says of a job and what the run says of itself, as one state."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distdl.cli import resume
from distdl.cli.jobs import list_runs, status
from distdl.config import compose
from distdl.config import recipe as configs
from distdl.job import JobState
from distdl.launch import following, jobs, resuming
from distdl.ranks import process_exit
from distdl.runs.directory import Attempt, RunDirectory
from distdl.runs.files import Damaged
from distdl.util.errors import UserError
from distdl.util.tail import tail
from distdl.validation import validate

LAUNCH = {"run_id": "e/r", "where": {"launcher": {}}, "resources": {}}


class Place:
    """A job whose place says what the test wants."""

    handle, url = "place://1", None

    def __init__(self, *states: JobState) -> None:
        self.states = list(states)
        self.cancelled = 0

    def state(self) -> JobState:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def wait(self) -> JobState:
        return self.states[-1]

    def logs(self, follow: bool = False) -> Iterator[str]:
        yield "a line"

    def cancel(self) -> None:
        self.cancelled += 1


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    begun = new_run(tmp_path / "e/r").begin_attempt(LAUNCH)
    jobs.record(begun, Place(JobState.PENDING))
    return begun


def new_run(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    run.create("seed: 1\n", {})
    return run


@pytest.mark.parametrize(
    ("recorded", "place", "expected"),
    [
        ("PENDING", "PENDING", "PENDING"),
        ("PENDING", "RUNNING", "RUNNING"),
        ("PENDING", "SUCCEEDED", "SUCCEEDED"),  # the store is elsewhere
        ("PENDING", "FAILED", "FAILED"),
        ("PENDING", "CANCELLED", "CANCELLED"),
        ("RUNNING", "PENDING", "PENDING"),  # requeued
        ("RUNNING", "SUCCEEDED", "FAILED"),  # gone without a word
        ("RUNNING", "UNKNOWN", "UNKNOWN"),
        ("SUCCEEDED", "UNKNOWN", "SUCCEEDED"),  # forgotten by the scheduler
        ("SUCCEEDED", "SUCCEEDED", "SUCCEEDED"),
        ("PREEMPTED", "SUCCEEDED", "PREEMPTED"),  # ranks end with 0 under mpirun
        ("PREEMPTED", "CANCELLED", "CANCELLED"),  # scancel: the same signal
        ("PREEMPTED", "PENDING", "PENDING"),
        ("CANCELLED", "FAILED", "CANCELLED"),
    ],
)
def test_both_as_one(attempt: Attempt, recorded: str, place: str, expected: str) -> None:
    attempt.update(state=recorded)
    assert jobs.state(attempt, Place(JobState(place))) is JobState(expected)  # type: ignore[arg-type]
    if JobState(expected).ended and place != "UNKNOWN":
        assert attempt.status()["state"] == expected  # and on record


def test_a_rank_that_failed_says_more_than_the_place(attempt: Attempt) -> None:
    attempt.update(state="RUNNING")
    attempt.record_error(1, "ValueError", "the cause", "", exit_code=7)
    assert jobs.state(attempt, Place(JobState.SUCCEEDED)) is JobState.FAILED  # type: ignore[arg-type]
    assert attempt.status()["error"] == "rank 1: ValueError: the cause"
    assert attempt.status()["exit_code"] == 7


def test_a_restart_of_its_scheduler_is_the_same_attempt(attempt: Attempt) -> None:
    attempt.begin()
    attempt.record_error(0, "OSError", "the first node", "")
    attempt.begin()
    assert attempt.status()["restarts"] == 1
    assert attempt.first_error() is None
    assert list((attempt.path / "errors-001").iterdir())


def test_a_run_is_not_submitted_twice(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(attempt.path.parents[1])
    monkeypatch.setattr(jobs, "of", lambda _: Place(JobState.PENDING))
    with pytest.raises(UserError, match="attempt 1 is pending"):
        jobs.refuse_second(run)
    monkeypatch.setattr(jobs, "of", lambda _: Place(JobState.CANCELLED))
    jobs.refuse_second(run)
    assert run.begin_attempt(LAUNCH).number == 2


@pytest.mark.parametrize(
    ("terminal", "answer", "cancelled"),
    [(True, "c", 1), (True, "d", 0), (True, "", 0), (False, None, 0)],
)
def test_ctrl_c_asks_on_a_terminal_and_else_leaves_the_job(
    attempt: Attempt, monkeypatch, capsys, terminal: bool, answer: str, cancelled: int
) -> None:
    class Interrupted(Place):
        def logs(self, follow: bool = False) -> Iterator[str]:
            if not self.cancelled:
                raise KeyboardInterrupt
            yield "checkpoint written"

    monkeypatch.setattr("sys.stdin.isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    job = Interrupted(JobState.CANCELLED)
    ended = following.follow(job, attempt)  # type: ignore[arg-type]
    assert job.cancelled == cancelled
    assert ended is (JobState.CANCELLED if cancelled else None)
    assert cancelled or "jobs logs --follow" in capsys.readouterr().out


def test_a_growing_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "late.log"
    ended = threading.Event()

    def write() -> None:
        time.sleep(0.1)
        with path.open("w") as file:
            for part in ("one\ntw", "o\nthree"):
                file.write(part)
                file.flush()
                time.sleep(0.1)
        ended.set()

    threading.Thread(target=write).start()
    assert list(tail(path, lambda: not ended.is_set(), 0.01)) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("code", "launcher", "ends"),
    [
        (75, "slurm", 0),  # srun would kill the others, who may still write
        (130, "mpi", 0),
        (75, "local", 75),
        (7, "mpi", 7),  # launchers/mpi/rank.py tells hydra to end the others
        (0, "mpi", 0),
        (1, "slurm", 1),
        (75, "azureml", 75),
    ],
)
def test_how_a_rank_exits(monkeypatch, code: int, launcher: str, ends: int) -> None:
    """In a fork of this process; an evicted rank waits for its node to go."""
    monkeypatch.setenv("DISTDL_LINGER_SECONDS", "0.2")
    started = time.monotonic()
    child = os.fork()
    if not child:
        process_exit.exit_process(code, launcher)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ends
    assert time.monotonic() - started > (0.2 if code == 75 else 0)


def test_a_reader_that_has_read_enough_ends_no_training(monkeypatch, caplog) -> None:
    """`distdl ... | head -3`."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        process_exit.outlive_readers()
        once = sys.stdout
        process_exit.outlive_readers()
        assert sys.stdout is once
        print("seen", flush=True)
        assert os.read(reading, 100) == b"seen\n"
        os.close(reading)
        for _ in range(2):
            print("not seen", flush=True)
        monkeypatch.undo()


def test_a_thread_that_keeps_the_process_is_named() -> None:
    code = (
        "import threading, time; from distdl.ranks import process_exit; "
        "process_exit.name_who_stays(0.05);"
        "threading.Thread(target=time.sleep, args=(0.4,), name='my-pump').start()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "waits for threads of your code: my-pump (" in done.stderr


def test_a_test_that_failed_is_no_failed_training(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run = new_run(tmp_path / "outputs/e/r")
    tasks = {"train": JobState.SUCCEEDED, "test": JobState.FAILED}
    for task, state in tasks.items():
        where = {"launcher": {}, "task": {"_target_": f"distdl.tasks.{task}"}}
        run.begin_attempt({**LAUNCH, "where": where}).end(
            state, metrics={"val/loss": 0.5, "train/loss": math.nan}
        )
    assert list_runs(tmp_path / "outputs") == 0
    cells = capsys.readouterr().out.strip().split("\t")
    assert cells[:3] == ["outputs/e/r", "1", "SUCCEEDED (test: FAILED)"]
    assert cells[-1] == "train/loss nan  val/loss 0.5"


def test_a_damaged_run_hides_no_other_in_the_list(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    frozen = {"config.yaml": "seed: ", "provenance.json": '{"command'}
    damage = {"status.json": "", "launch.yaml": "- 1", "job.json": "{}", **frozen}
    for name, text in {"whole": "", **damage}.items():
        run = new_run(tmp_path / "outputs/e" / name)
        attempt = run.begin_attempt(LAUNCH)
        attempt.end(JobState.SUCCEEDED)
        if name in damage:
            (run.path if name in frozen else attempt.path).joinpath(name).write_text(text)
    assert list_runs(tmp_path / "outputs") == 0
    rows = {line.split("\t")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "SUCCEEDED" in rows["outputs/e/whole"]
    for name in damage:
        assert "DAMAGED" in rows[f"outputs/e/{name}"], rows
        path = f"{name}/{name}" if name in frozen else f"{name}/attempts/001/{name}"
        assert f"outputs/e/{path} is damaged" in rows[f"outputs/e/{name}"]
        with pytest.raises(UserError, match=rf"{name}: is damaged"):
            status(jobs.targets(f"outputs/e/{name}", None))
        if name in frozen:
            assert "SUCCEEDED" in capsys.readouterr().out
            with pytest.raises(UserError, match=rf"{name}: is damaged.*\n.*restore it"):
                resuming.plan(RunDirectory.open(f"outputs/e/{name}"), [])


def test_a_status_that_was_removed_is_said_to_be_missing(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = new_run(tmp_path / "outputs/e/r")
    (run.begin_attempt(LAUNCH).path / "status.json").unlink()
    assert list_runs(tmp_path / "outputs") == 0 and status(jobs.targets("outputs/e/r", None)) == 1
    said = capsys.readouterr().out
    assert said.count("status.json is missing") == 2 and "UNKNOWN" in said
    assert "1970" not in said and "?" not in said


@pytest.mark.parametrize("kind", ["UserError", "Unfinished", "Killed"])
def test_a_refusal_and_a_kill_speak_for_themselves_also_of_a_copy(kind, tmp_path: Path, capsys):
    run = new_run(tmp_path / "e/r")
    attempt = run.begin_attempt(LAUNCH)
    text = f"killed by it\n    distdl resume {run.path} x=1, not {run.path}2"
    attempt.record_error(1, kind, text, "", 137 if kind == "Killed" else 2)
    attempt.conclude(JobState.FAILED, 2)
    run.path.rename(tmp_path / "copy")
    status(jobs.targets(str(tmp_path / "copy"), None))
    said = capsys.readouterr().out
    assert "error   rank 1: killed by it\n" in said
    assert f"distdl resume {tmp_path / 'copy'} x=1, not {run.path}2" in said


def test_the_advice_for_a_damaged_launch_leads_on(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        validate, "_ask_child", lambda request: {"problems": [], "notes": [], "facts": {}}
    )
    recipe = configs.recipe_of(compose.compose(["model=resnet18", "data=synthetic", "name=r"]))
    run = RunDirectory(tmp_path / "outputs/default/r")
    run.create(configs.to_yaml(recipe), {"command": ["python", "-m", "distdl", "launcher=mpi"]})
    (run.begin_attempt(LAUNCH).path / "launch.yaml").write_text("- 1")
    with pytest.raises(Damaged) as refused:
        resuming.plan(run, [])
    mended, _, then = refused.value.problems[0].remedy.partition("go on: ")[2].partition(" && ")
    subprocess.run(mended, shell=True, check=True)
    with pytest.raises(UserError, match="distdl resume outputs/default/r"):
        status(jobs.targets("outputs/default/r", None))
    folder = then.removeprefix("python -m distdl resume ")
    assert resume.main([folder, "dry_run=true"]) == 0
    said = capsys.readouterr().out
    assert "was started by: python -m distdl launcher=mpi" in said
    assert resuming.plan(run, ["dry_run=true"]).run_id == "default/r"


def test_a_run_that_cannot_be_asked_says_why(attempt: Attempt, monkeypatch, capsys) -> None:
    """And hides no other one in the list."""
    new_run(attempt.path.parents[2] / "other").begin_attempt(LAUNCH).end(JobState.SUCCEEDED)

    def out_of_reach(*_: object) -> None:
        raise ConnectionError("no route to the controller")

    monkeypatch.setattr(jobs.Platforms, "job", out_of_reach)
    assert list_runs(attempt.path.parents[2]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert any("UNKNOWN (ConnectionError)" in r and "no route to the" in r for r in rows)
    assert any("SUCCEEDED" in row for row in rows)
