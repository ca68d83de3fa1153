"""The platform's state of a job and the run's own, as one; and what is requested and listed."""

import math
import re
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from distdl.config import compose
from distdl.config import recipe as configs
from distdl.job import JobBase, JobState
from distdl.launch import following, jobs, planning, submitting
from distdl.launch.launch import Launch
from distdl.runs.attempt import Attempt
from distdl.runs.directory import RunDirectory
from distdl.util.errors import UserError

TINY = ["model=resnet18", "data=synthetic", "trainer.accelerator=cpu"]


LAUNCH = {"run_id": "e/r", "where": {"launcher": {}}, "resources": {}}


class Platform(JobBase):
    """A job whose platform reports a given state. Who follows it types Ctrl-C until it ends."""

    handle = "platform://1"
    url = None
    cancelled = 0

    def __init__(self, state):
        self.current = JobState(state)

    def state(self):
        return self.current

    wait = state

    def logs(self, follow):
        if not self.cancelled:
            raise KeyboardInterrupt
        return []

    def cancel(self):
        self.cancelled += 1


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def new_run(name="e/r", text="seed: 1\n", **provenance):
    run = RunDirectory(Path.cwd() / "outputs" / name)
    run.create(text, provenance)
    return run


@pytest.fixture
def attempt():
    begun = new_run().begin_attempt(LAUNCH)
    jobs.record(begun, Platform("PENDING"))
    return begun


def test_the_exit_code_is_the_runs_own(attempt):
    attempt.fail("killed by SIGKILL", 137)
    assert jobs.exit_code(JobState.FAILED, attempt) == 137
    assert jobs.exit_code(JobState.UNKNOWN, attempt) == JobState.UNKNOWN.exit_code
    assert jobs.exit_code(JobState.CANCELLED, None) == 130


STATES = [  # of the run, of the platform, of both
    ("PENDING", "RUNNING", "RUNNING"),
    ("PENDING", "SUCCEEDED", "SUCCEEDED"),  # the store is on another machine
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


@pytest.mark.parametrize("terminal, answer", [(True, "c"), (True, "d"), (True, ""), (False, None)])
def test_ctrl_c_asks_on_a_terminal(attempt, monkeypatch, capsys, terminal, answer):
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: terminal)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    job = Platform("CANCELLED")
    ended = following.follow(job, attempt)
    assert (ended, job.cancelled) == ((JobState.CANCELLED, 1) if answer == "c" else (None, 0))
    assert job.cancelled or "jobs logs --follow" in capsys.readouterr().out


# `jobs list` and `jobs status`


def rows(command):
    return {line.split("\t")[0]: line for line in command("jobs", "list").out.splitlines()}


def test_a_test_that_failed_is_no_failed_training(command):
    run = new_run()
    metrics = {"val/loss": 0.5, "train/loss": math.nan}
    for task, state in {"train": JobState.SUCCEEDED, "test": JobState.FAILED}.items():
        where = {"launcher": {}, "task": {"_target_": f"distdl.tasks.{task}"}}
        run.begin_attempt({**LAUNCH, "where": where}).end(state, metrics=metrics)
    cells = rows(command)["outputs/e/r"].split("\t")
    assert cells[1:3] == ["1", "SUCCEEDED (test: FAILED)"]
    assert cells[-1] == "train/loss nan  val/loss 0.5"


DAMAGE = {"status.json": "", "launch.yaml": "- 1", "job.json": "{}"}


FROZEN = {"config.yaml": "seed: ", "provenance.json": '{"command'}


def test_a_damaged_run_and_a_platform_out_of_reach_hide_no_other_run(attempt, monkeypatch, command):
    for name, text in ({"intact": "", "bare": ""} | DAMAGE | FROZEN).items():
        run = new_run(f"e/{name}")
        other = run.begin_attempt(LAUNCH)
        other.end(JobState.SUCCEEDED)
        if text or name in DAMAGE:
            (run.path if name in FROZEN else other.path).joinpath(name).write_text(text)
    (run.path.with_name("bare") / "attempts/001/status.json").unlink()

    def out_of_reach(*_):
        raise ConnectionError("no route to the controller")

    with monkeypatch.context() as patch:
        patch.setattr(jobs.Platforms, "job", out_of_reach)
        table = rows(command)
    assert "SUCCEEDED" in table["outputs/e/intact"]
    assert "UNKNOWN" in table["outputs/e/r"]
    assert "ConnectionError: no route to the" in table["outputs/e/r"]
    shown = command("jobs", "status", "outputs/e/bare")
    assert shown.code == 1
    assert "UNKNOWN" in shown.out
    for text in (table["outputs/e/bare"], shown.out):
        assert "status.json is missing" in text
        assert "1970" not in text
    for name in DAMAGE | FROZEN:
        path = f"{name}/{name}" if name in FROZEN else f"{name}/attempts/001/{name}"
        assert "DAMAGED" in table[f"outputs/e/{name}"], table
        assert f"outputs/e/{path} is damaged" in table[f"outputs/e/{name}"]
        shown = command("jobs", "status", f"outputs/e/{name}")
        assert shown.code == 2
        assert f"{name}: is damaged" in shown.err
        if name in FROZEN:
            assert "SUCCEEDED" in shown.out
            assert "restore it" in command("resume", f"outputs/e/{name}").err


def test_the_advice_for_a_damaged_launch_works(without_stage_2, command):
    recipe = configs.to_yaml(configs.recipe_of(compose.compose([*TINY, "name=r"])))
    run = new_run("default/r", recipe, command=["python", "-m", "distdl", "launcher=mpi"])
    (run.begin_attempt(LAUNCH).path / "launch.yaml").write_text("- 1")
    advice = re.search("mv .*", command("resume", "outputs/default/r").err)[0]
    repair, _, resumes = advice.partition(" && ")
    subprocess.run(repair, shell=True, check=True)
    assert "distdl resume outputs/default/r" in command("jobs", "status", "outputs/default/r").err
    shown = command(*resumes.removeprefix("python -m distdl ").split(), "dry_run=true")
    assert shown.code == 0
    assert "was started by: python -m distdl launcher=mpi" in shown.out


def test_another_start_takes_the_number_of_this_attempt(without_stage_2, monkeypatch):
    mine = planning.plan(compose.compose([*TINY, "name=d"]))
    launcher = Mock()
    launcher.reach = lambda _: submitting.create_attempt(mine, ["x"], None).end(JobState.FAILED)
    monkeypatch.setattr(jobs, "instantiate", lambda node, known: launcher)
    monkeypatch.setattr(Launch, "foreground", False)
    monkeypatch.setattr(submitting, "snapshot_of", lambda planned: None)
    attempt, _ = submitting.submit(mine, ["distdl"])
    requested = [call.args[0].attempt for call in launcher.request.call_args_list]
    assert requested == [1, 2]
    assert attempt.number == 2


def test_a_copys_job_is_not_asked_or_cancelled(tmp_path, monkeypatch):
    attempt = Attempt(tmp_path / "run/attempts/001")
    attempt.path.mkdir(parents=True)
    where = {"launcher": {"_target_": "distdl.launchers.slurm.SlurmLauncher"}}
    attempt.write_launch({"run_id": "x/run", "where": where})
    job = SimpleNamespace(handle="slurm://12", url=None)
    jobs.record(attempt, job)
    assert attempt.job()["host"] == socket.gethostname()
    asked: list[str] = []

    def attach(handle: str) -> SimpleNamespace:
        asked.append(handle)
        return job

    launcher = SimpleNamespace(attach=attach)
    monkeypatch.setattr(jobs.Platforms, "_launcher", lambda *_: launcher)
    assert jobs.job_of(attempt).own is job
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = jobs.job_of(Attempt(tmp_path / "copy/attempts/001"))
    with pytest.raises(UserError, match="of which this is a copy"):
        copy.cancel()
    with pytest.raises(UserError, match="of which this is a copy"):
        copy.leave("verdict.json", b"{}")  # a search's word would go to the original
    assert asked == ["slurm://12"]
