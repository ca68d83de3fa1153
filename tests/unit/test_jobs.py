"""The platform's state of a job and the run's own, as one; and what is requested and listed."""

import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from distdl.cli import resume
from distdl.cli.jobs import list_runs, status
from distdl.config import compose
from distdl.config import recipe as configs
from distdl.job import JobSpec, JobState, Resources
from distdl.launch import following, jobs, planning, resuming, start
from distdl.ranks import process_exit
from distdl.runs.directory import RunDirectory
from distdl.runs.files import Damaged
from distdl.util.errors import UserError
from distdl.util.tail import tail

TINY = ["model=resnet18", "data=synthetic", "trainer.accelerator=cpu"]
LAUNCH = {"run_id": "e/r", "where": {"launcher": {}}, "resources": {}}


class Platform:
    """A job whose platform reports a given state."""

    handle, url, cancelled = "platform://1", None, 0

    def __init__(self, state, interrupts=0):
        self.current, self.interrupts = JobState(state), interrupts

    def state(self):
        return self.current

    wait = state

    def logs(self, follow=False):
        if self.interrupts > self.cancelled:
            raise KeyboardInterrupt
        yield "a line"

    def cancel(self):
        self.cancelled += 1


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def new_run(name="e/r", text="seed: 1\n", provenance=None):
    run = RunDirectory(Path.cwd() / "outputs" / name)
    run.create(text, provenance or {})
    return run


@pytest.fixture
def attempt():
    begun = new_run().begin_attempt(LAUNCH)
    jobs.record(begun, Platform("PENDING"))
    return begun


STATES = [  # of the run, of the platform, of both
    ("PENDING", "PENDING", "PENDING"),
    ("PENDING", "RUNNING", "RUNNING"),
    ("PENDING", "SUCCEEDED", "SUCCEEDED"),  # the store is on another machine
    ("PENDING", "CANCELLED", "CANCELLED"),
    ("RUNNING", "PENDING", "PENDING"),  # requeued
    ("RUNNING", "SUCCEEDED", "FAILED"),  # ended without recording it
    ("RUNNING", "UNKNOWN", "UNKNOWN"),
    ("SUCCEEDED", "UNKNOWN", "SUCCEEDED"),  # forgotten by the scheduler
    ("PREEMPTED", "SUCCEEDED", "PREEMPTED"),  # ranks end with 0 under mpirun
    ("PREEMPTED", "CANCELLED", "CANCELLED"),  # scancel: the same signal
    ("CANCELLED", "FAILED", "CANCELLED"),
]


@pytest.mark.parametrize("recorded, platform, both", STATES)
def test_the_state_of_run_and_platform(attempt, recorded, platform, both):
    attempt.update(state=recorded)
    assert jobs.state(attempt, Platform(platform)) is JobState(both)
    if JobState(both).ended and platform != "UNKNOWN":
        assert attempt.status()["state"] == both  # and on record


def test_errors_restarts_and_second_attempts(attempt, monkeypatch):
    attempt.update(state="RUNNING")
    attempt.record_error(1, "ValueError", "the cause", "", exit_code=7)
    assert jobs.state(attempt, Platform("SUCCEEDED")) is JobState.FAILED
    facts = attempt.status()
    assert (facts["error"], facts["exit_code"]) == ("rank 1: ValueError: the cause", 7)
    attempt.begin()
    attempt.record_error(0, "OSError", "the first node", "")
    attempt.begin()  # its scheduler restarts it: the same attempt
    assert attempt.status()["restarts"] == 1 and attempt.first_error() is None
    assert list((attempt.path / "errors-001").iterdir())
    run = RunDirectory(attempt.path.parents[1])
    monkeypatch.setattr(jobs, "job_of", lambda _: Platform("PENDING"))
    with pytest.raises(UserError, match="attempt 1 is pending"):
        jobs.refuse_second(run)
    monkeypatch.setattr(jobs, "job_of", lambda _: Platform("CANCELLED"))
    jobs.refuse_second(run)
    assert run.begin_attempt(LAUNCH).number == 2


@pytest.mark.parametrize("terminal, answer", [(True, "c"), (True, "d"), (True, ""), (False, None)])
def test_ctrl_c_asks_on_a_terminal_and_else_leaves_the_job(
    attempt, monkeypatch, capsys, terminal, answer
):
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: terminal)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    job = Platform("CANCELLED", interrupts=1)
    ended = following.follow(job, attempt)
    assert (ended, job.cancelled) == ((JobState.CANCELLED, 1) if answer == "c" else (None, 0))
    assert job.cancelled or "jobs logs --follow" in capsys.readouterr().out


def test_a_growing_file_is_read_to_its_end(tmp_path):
    path, ended = tmp_path / "late.log", threading.Event()

    def write():
        time.sleep(0.1)
        with path.open("w", buffering=1) as file:
            file.write("one\ntw")
            time.sleep(0.1)
            file.write("o\nthree")
        ended.set()

    threading.Thread(target=write).start()
    assert list(tail(path, lambda: not ended.is_set(), 0.01)) == ["one", "two", "three"]


EXITS = [
    (75, "slurm", 0),  # srun would kill the others, who may still write
    (130, "mpi", 0),
    (75, "local", 75),
    (7, "mpi", 7),  # launchers/mpi/rank.py tells hydra to end the others
    (1, "slurm", 1),
    (75, "azureml", 75),
]


@pytest.mark.parametrize("code, launcher, ends", EXITS)
def test_how_a_rank_exits(monkeypatch, code, launcher, ends):
    """In a fork of this process; an evicted rank waits for its node to go."""
    monkeypatch.setenv("DISTDL_LINGER_SECONDS", "0.2")
    started = time.monotonic()
    if not (child := os.fork()):
        process_exit.exit_process(code, launcher)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ends
    assert time.monotonic() - started > (0.2 if code == 75 else 0)


def test_a_reader_that_has_ended_does_not_end_the_training(monkeypatch):
    """`distdl ... | head -3`."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        process_exit.survive_closed_pipes()
        once = sys.stdout
        process_exit.survive_closed_pipes()
        assert sys.stdout is once
        print("seen", flush=True)
        assert os.read(reading, 100) == b"seen\n"
        os.close(reading)
        for _ in range(2):
            print("not seen", flush=True)
        monkeypatch.undo()


STAYS = """
import threading, time; from distdl.ranks import process_exit
process_exit.report_waiting_threads(0.05)
threading.Thread(target=time.sleep, args=(0.4,), name='my-pump').start()
"""


def test_a_thread_that_keeps_the_process_is_named():
    done = subprocess.run([sys.executable, "-c", STAYS], capture_output=True, text=True)
    assert done.returncode == 0 and "waits for threads of your code: my-pump (" in done.stderr


def rows(capsys, folder="outputs"):
    capsys.readouterr()
    assert list_runs(Path(folder).absolute()) == 0
    return {line.split("\t")[0]: line for line in capsys.readouterr().out.splitlines()}


def test_a_test_that_failed_is_no_failed_training(capsys):
    run, metrics = new_run(), {"val/loss": 0.5, "train/loss": math.nan}
    for task, state in {"train": JobState.SUCCEEDED, "test": JobState.FAILED}.items():
        where = {"launcher": {}, "task": {"_target_": f"distdl.tasks.{task}"}}
        run.begin_attempt({**LAUNCH, "where": where}).end(state, metrics=metrics)
    cells = rows(capsys)["outputs/e/r"].split("\t")
    assert cells[1:3] == ["1", "SUCCEEDED (test: FAILED)"]
    assert cells[-1] == "train/loss nan  val/loss 0.5"


DAMAGE = {"status.json": "", "launch.yaml": "- 1", "job.json": "{}"}
FROZEN = {"config.yaml": "seed: ", "provenance.json": '{"command'}


def test_a_damaged_run_hides_no_other_in_the_list(capsys):
    for name, text in ({"intact": ""} | DAMAGE | FROZEN).items():
        run = new_run(f"e/{name}")
        attempt = run.begin_attempt(LAUNCH)
        attempt.end(JobState.SUCCEEDED)
        if name != "intact":
            (run.path if name in FROZEN else attempt.path).joinpath(name).write_text(text)
    table = rows(capsys)
    assert "SUCCEEDED" in table["outputs/e/intact"]
    for name in DAMAGE | FROZEN:
        path = f"{name}/{name}" if name in FROZEN else f"{name}/attempts/001/{name}"
        assert "DAMAGED" in table[f"outputs/e/{name}"], table
        assert f"outputs/e/{path} is damaged" in table[f"outputs/e/{name}"]
        with pytest.raises(UserError, match=rf"{name}: is damaged"):
            status(jobs.targets(f"outputs/e/{name}", None))
        if name in FROZEN:
            assert "SUCCEEDED" in capsys.readouterr().out
            with pytest.raises(Damaged, match="restore it"):
                resuming.plan(RunDirectory.open(f"outputs/e/{name}"), [])


def test_a_missing_status_and_a_platform_out_of_reach(attempt, monkeypatch, capsys):
    (new_run("e/bare").begin_attempt(LAUNCH).path / "status.json").unlink()
    assert "status.json is missing" in rows(capsys)["outputs/e/bare"]
    assert status(jobs.targets("outputs/e/bare", None)) == 1
    output = capsys.readouterr().out
    assert "status.json is missing" in output and "UNKNOWN" in output
    assert "1970" not in output and "?" not in output

    new_run("e/other").begin_attempt(LAUNCH).end(JobState.SUCCEEDED)

    def out_of_reach(*_):
        raise ConnectionError("no route to the controller")

    monkeypatch.setattr(jobs.Platforms, "job", out_of_reach)
    table = rows(capsys)
    assert "UNKNOWN (ConnectionError)" in table["outputs/e/r"]
    assert "no route to the" in table["outputs/e/r"] and "SUCCEEDED" in table["outputs/e/other"]


@pytest.mark.parametrize("kind", ["UserError", "Unfinished", "Killed"])
def test_the_text_of_a_refusal_or_a_kill_fits_also_a_copy(kind, attempt, capsys):
    run = attempt.path.parents[1]
    (attempt.path / "job.json").unlink()
    text = f"killed by it\n    distdl resume {run} x=1, not {run}2"
    attempt.record_error(1, kind, text, "", 137 if kind == "Killed" else 2)
    attempt.conclude(JobState.FAILED, 2)
    copy = run.rename(run.with_name("copy"))
    status(jobs.targets(str(copy), None))
    output = capsys.readouterr().out
    killed = "rank 1 failed first: killed by it distdl resume "
    first = killed if kind == "Killed" else "rank 1: killed by it\n"
    assert f"error   {first}" in output
    assert f"distdl resume {copy} x=1, not {run}2" in output


def test_the_advice_for_a_damaged_launch_works(without_stage_2, capsys):
    recipe = configs.to_yaml(configs.recipe_of(compose.compose([*TINY, "name=r"])))
    run = new_run("default/r", recipe, {"command": ["python", "-m", "distdl", "launcher=mpi"]})
    (run.begin_attempt(LAUNCH).path / "launch.yaml").write_text("- 1")
    with pytest.raises(Damaged) as error:
        resuming.plan(run, [])
    advice = error.value.problems[0].remedy
    repair, _, resumes = advice[advice.index("mv ") :].partition(" && ")
    subprocess.run(repair, shell=True, check=True)
    with pytest.raises(UserError, match="distdl resume outputs/default/r"):
        status(jobs.targets("outputs/default/r", None))
    assert resume.main([resumes.removeprefix("python -m distdl resume "), "dry_run=true"]) == 0
    assert "was started by: python -m distdl launcher=mpi" in capsys.readouterr().out
    assert resuming.plan(run, ["dry_run=true"]).run_id == "default/r"


class Counting:
    """A launcher that keeps the numbers of the attempts that were requested."""

    def __init__(self):
        self.requests, self.meanwhile = [], lambda: None

    def request(self, spec):
        return self.request_sweep([spec])

    def request_sweep(self, specs):
        self.requests.append([spec.attempt for spec in specs])
        return "request"

    def reach(self, request):
        self.meanwhile()

    def submit(self, request):
        jobs = [SimpleNamespace(handle="counting://1", url=None) for _ in self.requests[-1]]
        return jobs if len(jobs) > 1 else jobs[0]


def test_requests_of_runs_of_a_sweep_and_after_another_start(without_stage_2, monkeypatch, capsys):
    launcher = Counting()
    monkeypatch.setattr(jobs, "instantiate", lambda node: launcher)
    monkeypatch.setattr(start, "is_foreground", lambda config: False)
    monkeypatch.setattr(start, "snapshot_of", lambda planned: None)

    def planned(name):
        return planning.plan(compose.compose([*TINY, f"name={name}"]))

    attempt, _ = start.submit(planned("a"), ["distdl"])
    assert launcher.requests == [[1]] and attempt.number == 1
    start.submit_sweep([planned("b"), planned("c")], ["distdl"])
    assert launcher.requests[1:] == [[1, 1]]
    assert capsys.readouterr().out.count("submitted  counting://1  outputs/default/") == 2

    def other_start():  # takes the number of this attempt
        start.create_attempt(mine, ["distdl"], None).end(JobState.FAILED)

    mine, launcher.meanwhile = planned("d"), other_start
    attempt, _ = start.submit(mine, ["distdl"])
    assert launcher.requests[2:] == [[1], [2]] and attempt.number == 2


PATHS = [("name", {"name": "a\nb"}), ("output_dir", {"store": "/a\u2028b"})]
PATHS += [("output_dir", {"bundle": "/a\tb"}), ("launcher.env.A B", {"env": {"A B": "1"}})]


@pytest.mark.parametrize("path, field", PATHS)
def test_a_spec_is_printable_on_single_lines(path, field):
    fields = {"name": "e/r", "bundle": "/b", "store": "/s", "attempt": 1, "resources": Resources()}
    with pytest.raises(UserError) as error:
        JobSpec(**{**fields, **field})
    assert [problem.path for problem in error.value.problems] == [path]
