"""Platforms that answer, refuse, are silent or know nobody: each is asked once, beside the others,
and its silence hides no job of another."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from distdl.job import JobState, adapted_job
from distdl.launch import asking, jobs
from distdl.launchers.queried_job import QueriedJob
from distdl.launchers.sagemaker import aws
from distdl.launchers.sagemaker import sagemaker_launcher as sagemaker
from distdl.runs.directory import RunDirectory
from distdl.util.errors import Forgotten, NoRight, NotSignedIn, UserError
from tests.written import program

CONFIG = """[profile refusing]
endpoint_url = http://127.0.0.1:{refusing}
[profile silent]
endpoint_url = http://127.0.0.1:{silent}
[profile nobody]
"""
KEYS = "[{0}]\naws_access_key_id = x\naws_secret_access_key = x\n"
SLURM = {"_target_": "distdl.launchers.slurm.SlurmLauncher"}
RUNNING = 'seq 0 29 | while read n; do echo "$n|RUNNING|None"; done'


@pytest.fixture
def sockets(tmp_path, monkeypatch, command):
    """Accounts on a port that nobody listens at, at one that accepts and says nothing, and one
    without credentials; and Slurm's commands."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        ports = {"silent": silent.getsockname()[1], "refusing": refusing.getsockname()[1]}
        (tmp_path / "config").write_text(CONFIG.format(**ports))
        (tmp_path / "keys").write_text("".join(map(KEYS.format, ports)))
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        files = {"CONFIG_FILE": "config", "SHARED_CREDENTIALS_FILE": "keys"}
        for name, value in files.items():
            monkeypatch.setenv(f"AWS_{name}", str(tmp_path / value))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        (tmp_path / "bin").mkdir()
        for name in ("squeue", "scontrol", "scancel"):
            program(tmp_path / "bin" / name, f'echo "$@" >> {tmp_path}/{name}; {RUNNING}')
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        monkeypatch.setattr(aws, "TRIES", 1)
        yield SimpleNamespace(silent=silent)


def new_run(name, launcher, handle):
    run = RunDirectory(Path.cwd() / "outputs" / name)
    run.create("seed: 1\n", {})
    launch = {"run_id": name, "where": {"launcher": launcher}, "resources": {}}
    jobs.record(run.begin_attempt(launch), SimpleNamespace(handle=handle, url=None))


def new_runs(count, profiles):
    """Runs on as many platforms, in turn; the newest are on those that do not answer."""
    kinds = ["slurm", *profiles]
    for number in range(count):
        kind = kinds[number % len(kinds)]
        launcher = {"_target_": f"{sagemaker.__name__}.SageMakerLauncher", "profile": kind}
        handle = f"sagemaker://eu-west-1/job-{number}"
        if kind == "slurm":
            launcher = SLURM
            handle = f"slurm://{number}"
        new_run(f"e/{kind}{number}", launcher, handle)


def test_the_runs_of_platforms_that_answer_come_first_and_the_others_have_a_reason(
    sockets, command, monkeypatch
):
    new_runs(30, ["silent", "refusing", "nobody"])
    monkeypatch.setattr(asking, "LIMIT_S", 5.0)
    rows = [line.split("\t") for line in command("jobs", "list").out.splitlines()]
    assert len(rows) == 30
    kinds = [row[0].removeprefix("outputs/e/").rstrip("0123456789") for row in rows]
    assert kinds[:8] == ["slurm"] * 8
    silent = "SageMaker in eu-west-1 (profile {}) has not answered for 5 s"
    reasons = {
        "silent": silent.format("silent"),
        "refusing": "Could not connect to the endpoint",
        "nobody": "no AWS credentials",
    }
    for kind, row in zip(kinds, rows, strict=True):
        assert row[2] == ("RUNNING" if kind == "slurm" else "UNKNOWN"), row
        told = kind == "slurm" or reasons[kind] in row[-1]
        assert told or silent.format(kind) in row[-1], "as on a machine that is too busy to ask"
    sockets.silent.settimeout(60)  # a busy machine is given up before it has asked
    sockets.silent.accept()[0].close()
    sockets.silent.settimeout(0.1)
    with pytest.raises(TimeoutError):  # one question for all of its jobs
        sockets.silent.accept()


def test_a_platform_out_of_reach_keeps_no_other_job_from_being_cancelled(
    sockets, command, tmp_path
):
    new_runs(4, ["refusing"])
    done = command("jobs", "cancel", "outputs")
    assert done.out.count("asked to end") == 2
    assert done.code == 2
    assert sorted((tmp_path / "scancel").read_text().split()) == ["0", "2"]
    assert done.err.count("was not asked to end: ") == 2
    assert done.err.count("Could not connect to the endpoint") == 2


def test_a_question_about_one_job_ends_too(sockets, command, monkeypatch):
    new_runs(2, ["silent"])
    monkeypatch.setattr(asking, "LIMIT_S", 0.3)
    status = command("jobs", "status", "outputs/e/silent1")
    assert status.code == 1
    assert "has not answered for 0 s" in status.out
    done = command("jobs", "logs", "outputs/e/silent1")
    assert done.code == 2
    assert "has not answered for 0 s" in done.err
    (Path.cwd() / "outputs/e/silent1/attempts/001/logs").mkdir(parents=True, exist_ok=True)
    Path("outputs/e/silent1/attempts/001/logs/rank_0.log").write_text("epoch 1\n", encoding="utf-8")
    done = command("jobs", "logs", "outputs/e/silent1")
    assert done.code == 0
    assert "rank_0.log:\nepoch 1\n" in done.out
    monkeypatch.setattr(aws, "READ_S", 0.3)
    with pytest.raises(UserError, match="AWS: Read timeout on endpoint"):
        sagemaker.SageMakerLauncher(profile="silent").attach("sagemaker://eu-west-1/a").describe()


class Asked(QueriedJob):
    """A job on a platform that answers what `listed` and `answer` say, or raises it."""

    platform = "Platform"
    listed = None
    queries = 0

    def __init__(self, answer="RUNNING"):
        self.answer = answer

    def _query(self):
        type(self).queries += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @classmethod
    def _query_all(cls, jobs):
        if cls.listed is not None:
            raise cls.listed
        yield jobs[0], "PENDING"

    def _state_from(self, answer):
        return JobState(answer)


DOWN = UserError("the platform is down")
UNKNOWN = JobState.UNKNOWN


@pytest.mark.parametrize(
    ("listed", "answer", "states", "queries"),
    [
        (None, "RUNNING", ["PENDING", "RUNNING", "RUNNING", "RUNNING"], 3),
        (None, DOWN, ["PENDING", UNKNOWN, UNKNOWN, UNKNOWN], 1),
        (None, Forgotten("gone"), ["PENDING", UNKNOWN, "RUNNING", "RUNNING"], 3),
        (NoRight("to list"), "RUNNING", ["RUNNING"] * 4, 4),
        (NoRight("to list"), NoRight("to this"), ["RUNNING", UNKNOWN, "RUNNING", "RUNNING"], 4),
        (NotSignedIn("who are you"), "RUNNING", [UNKNOWN] * 4, 0),
        (DOWN, "RUNNING", [UNKNOWN] * 4, 0),
    ],
    ids=str,
)
def test_what_keeps_a_platform_from_answering_is_met_once(
    monkeypatch, listed, answer, states, queries
):
    monkeypatch.setattr(Asked, "listed", listed)
    monkeypatch.setattr(Asked, "queries", 0)
    reports = asking.ask_all([Asked(), Asked(answer), Asked(), Asked()])
    assert [report.state for report in reports] == states
    assert Asked.queries == queries
    for report in reports:
        about_the_job = isinstance(answer, Forgotten | NoRight) and listed is not DOWN
        assert report.state is not UNKNOWN or report.why
        assert report.reached == (report.state is not UNKNOWN or about_the_job)


def test_what_a_platform_said_before_it_went_silent_is_shown(monkeypatch):
    """Also while each answer takes long, as long as there is one within the limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def hang(job):
            if job.answer == "never":
                socket.create_connection(silent.getsockname()).recv(1)
            return job.answer

        monkeypatch.setattr(Asked, "_query", hang)
        monkeypatch.setattr(asking, "LIMIT_S", 0.5)
        blocks = [*asking.blocks([Asked(), Asked("RUNNING"), Asked("never"), Asked("FAILED")])]
    assert [{n: report.state for n, report in block.items()} for block in blocks] == [
        {0: "PENDING", 1: "RUNNING"},
        {2: UNKNOWN, 3: UNKNOWN},
    ]
    assert blocks[1][3].why == "Platform has not answered for 0 s"


def test_an_outage_while_a_job_is_awaited_is_said_once(monkeypatch, capsys):
    answers = iter(["RUNNING", DOWN, DOWN, "RUNNING", DOWN, "SUCCEEDED"])

    def answer(_):
        given = next(answers)
        if isinstance(given, Exception):
            raise given
        return given

    monkeypatch.setattr(Asked, "_query", answer)
    monkeypatch.setattr(Asked, "poll_seconds", 0.0)
    assert Asked().wait() is JobState.SUCCEEDED
    said = "Platform does not answer, trying again: the platform is down\n"
    assert capsys.readouterr().err == 2 * said


def test_a_question_that_fails_in_a_launcher_of_ones_own_is_a_report():
    class Own:
        def __init__(self, state):
            self.current = state

        def state(self):
            if isinstance(self.current, Exception):
                raise self.current
            return self.current

    def asked(*states):
        return asking.ask_all([adapted_job(Own(state)) for state in states])

    reports = asked(JobState.RUNNING, KeyError("id"))
    assert reports[0] == asking.Report(JobState.RUNNING)
    assert (reports[1].state, reports[1].why) == (UNKNOWN, "'id'")
    Own.ask = staticmethod(lambda jobs: 1 / 0)
    reports = asked(JobState.RUNNING, JobState.RUNNING)
    assert [type(report.error) for report in reports] == [ZeroDivisionError] * 2
