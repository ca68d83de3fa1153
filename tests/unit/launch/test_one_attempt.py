"""A run has one attempt at a time, also where nobody can say whether the last one has ended."""

import shutil
import socket
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from distdl.config import compose
from distdl.config import recipe as configs
from distdl.job import JobState
from distdl.launch import jobs, one_attempt
from distdl.launchers.mpi.supervisor import RECORD
from distdl.runs.bundle import Bundle
from distdl.runs.directory import RunDirectory
from distdl.runs.files import write_json
from distdl.util.errors import UserError
from tests.written import program

TINY = [
    "model=resnet18",
    "data=synthetic",
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    "name=r",
]
RUN = "outputs/default/r"


@pytest.fixture
def slurm(tmp_path, monkeypatch, command):
    """Sets what Slurm's commands do."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    def does(script):
        for name in ("squeue", "scontrol", "sacct", "sbatch"):
            program(tmp_path / "bin" / name, script)

    does("echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1")
    return does


@pytest.fixture
def run(tmp_path, monkeypatch, slurm):
    """A run with an attempt under Slurm."""
    monkeypatch.chdir(tmp_path)
    config = compose.compose([*TINY, "launcher=slurm", f"output_dir={tmp_path}/outputs"])
    run = RunDirectory(tmp_path / RUN)
    run.create(configs.to_yaml(configs.recipe_of(config)), {})
    where = OmegaConf.to_container(configs.where_of(config))
    attempt = run.begin_attempt({"run_id": "default/r", "where": where, "resources": {}})
    jobs.record(attempt, SimpleNamespace(handle="slurm://7", url=None))
    return run


def starts(run):
    """Whether another attempt may be begun."""
    try:
        one_attempt.refuse_second(run)
    except UserError as error:
        (problem,) = error.problems
        assert f"python -m distdl jobs ended {RUN}" in problem.remedy, problem
        return False
    return True


UNREACHABLE = [("PENDING", False), ("RUNNING", False), ("PREEMPTED", False), ("FAILED", True)]


@pytest.mark.parametrize(("recorded", "is_known"), UNREACHABLE)
def test_an_attempt_that_may_be_under_way_is_refused(run, recorded, is_known):
    """A preempted one may have been put back into the queue."""
    run.last_attempt().update(state=recorded)
    assert starts(run) == is_known


def test_a_platform_that_has_forgotten_a_job_has_not_put_it_back(run, slurm):
    slurm("echo Invalid job id >&2; exit 1")
    assert not starts(run), "it may be another cluster's"
    run.last_attempt().update(state="PREEMPTED")
    assert starts(run)


def test_its_user_may_say_that_it_has_ended(run, command, without_stage_2):
    refused = command("resume", RUN)
    assert refused.code == 2
    assert run.last_attempt().number == 1
    for words in ("may be under way still", "slurm://7", "Unable to contact slurm controller"):
        assert words in refused.err
    said = command("jobs", "ended", RUN)
    assert (said.code, said.err) == (0, "")
    assert "attempt 1 is recorded as ended" in said.out
    assert run.last_attempt().state() is JobState.FAILED
    assert starts(run)
    assert "its user has said" in command("jobs", "status", RUN).out


def test_whoever_waits_or_runs_has_not_ended(run, command, slurm):
    slurm("echo JobState=RUNNING")
    said = command("jobs", "ended", RUN)
    assert said.code == 2
    assert "attempt 1 has not ended: it is running" in said.err
    assert run.last_attempt().status()["state"] == "PENDING"


def test_a_job_on_another_machine(run, tmp_path, command):
    """mpirun's job is known where it was started alone; a local one by nobody else at all."""
    attempt = run.last_attempt()
    launch = attempt.launch()
    launch["where"]["launcher"] = {"_target_": "distdl.launchers.mpi.MpiLauncher"}
    attempt.write_launch(launch)
    handle = f"mpi://elsewhere{attempt.path}"
    jobs.record(attempt, SimpleNamespace(handle=handle, url=None))
    assert not starts(run), "without its supervisor's record"
    write_json(attempt.path / RECORD, {"host": "elsewhere", "pid": 1})
    assert not starts(run)
    assert command("jobs", "ended", RUN).code == 0
    assert starts(run)

    local = run.begin_attempt(launch)
    local.update(state="RUNNING", host="elsewhere")
    with pytest.raises(UserError, match=f"jobs ended {run.path}"):
        run.refuse_under_way()
    local.update(host=socket.gethostname())
    assert command("jobs", "ended", RUN).code == 2, "this machine knows better"
    local.update(host="elsewhere")
    assert command("jobs", "ended", RUN).code == 0
    run.refuse_under_way()


def test_a_copy_of_a_run_may_be_resumed(run, tmp_path):
    """The job goes on in the folder of which it is a copy."""
    shutil.copytree(run.path, tmp_path / "copy")
    assert starts(RunDirectory(tmp_path / "copy"))
    assert not starts(run)


def test_one_that_was_wrongly_held_for_dead_does_not_begin(run, tmp_path):
    bundle = Bundle(run.path)
    first = run.last_attempt()
    first.end(JobState.FAILED, concluded=True)
    assert bundle.create_store(run, 1) == first
    second = run.begin_attempt(first.launch())
    with pytest.raises(UserError, match="attempt 2 has taken over"):
        bundle.create_store(run, 1)
    assert bundle.create_store(run, 2) == second
