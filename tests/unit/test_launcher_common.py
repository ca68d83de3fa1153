"""Shared by launchers: settings as validation sees them, walltime, polling, remote files."""

import os

import pytest

from distdl.job import JobState
from distdl.launchers import common
from distdl.launchers.azureml.launcher import AzureMLLauncher
from distdl.launchers.common import Forgotten, QueriedJob, RemoteFile, fetch_files, from_pages
from distdl.launchers.sagemaker import SageMakerLauncher
from distdl.launchers.slurm import SlurmLauncher
from distdl.util import walltime
from distdl.util.errors import Problem, UserError
from distdl.validation.child import Binding

CONTEXT = {"local": False, "num_nodes": 1, "devices": 1, "accelerator": "cpu"}


def test_validation_reports_keys_types_ranges_and_misfits_at_once():
    node = {"_target_": "distdl.launchers.slurm.SlurmLauncher", "requeue": False, "gpuss": 1}
    node |= {"mem": 4, "grace_seconds": 0, "walltime": "1:30", "requeue_at_time_limit": True}
    request = {"config": {"launcher": node}, "context": CONTEXT, "trust": [[], []]}
    binding = Binding({**request, "supplied": {}, "expressions": []})
    binding.run()
    problems = {problem.path.removeprefix("launcher."): problem for problem in binding.problems}
    assert set(problems) == node.keys() - {"_target_", "requeue"}
    assert "did you mean launcher.gpus?" in str(problems["gpuss"])


HOURS = {12: 12, 0.5: 0.5, "90": 90, " 0.5 ": 0.5, "1:30:00": 1.5, "0:00:01": 1 / 3600, "2-12": 60}
HOURS |= {"1-00": 24, "1-00:30": 24.5, "1-00:00:30": 24 + 1 / 120}
NO_TIMES = {
    "is not a time above 0": [0, "0:00:00", "0-00", -1],
    "minutes and seconds go from 00 to 59": ["1:90:00", "1:00:60", "1:3:00"],
    "hours go from 0 to 23": ["1-24"],
    "is minutes and seconds for Slurm, and hours and minutes for others": ["1:30"],
    "5400 would be 5400 hours; did YAML read 1:30:00": [5400],
    "is not a time": ["a day", "", "-1", "1_0", float("nan"), float("inf"), True, [12]],
}


@pytest.mark.parametrize("message", NO_TIMES)
def test_walltime_is_the_same_for_all_launchers(message):
    for text, hours in HOURS.items():
        assert walltime.seconds(text) == round(3600 * hours)
    for value in NO_TIMES[message]:
        with pytest.raises(ValueError, match=message) as error:
            walltime.seconds(value)
        assert str(error.value).startswith(repr(value))
        for launcher in (SlurmLauncher, AzureMLLauncher, SageMakerLauncher):
            problems = launcher.check({"walltime": value}, CONTEXT)
            texts = [(p.what, p.remedy) for p in problems if p.path == "walltime"]
            assert texts == [(str(error.value), walltime.FORMS)]


class Asked(QueriedJob):
    """A job that answers with the given states and errors, in turn."""

    poll_seconds, handle = 0.0, "x://1"

    def __init__(self, *answers):
        self.answers = list(answers)

    def _query(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @classmethod
    def _query_all(cls, jobs):
        yield from zip(jobs, [JobState.RUNNING, UserError("gone")], strict=False)

    def _state_from(self, answer):
        return JobState(answer)


def test_one_answer_to_ask_is_used_once():
    jobs = [Asked("FAILED"), Asked("FAILED"), Asked("PENDING")]
    Asked.ask(jobs)
    assert [job.state() for job in jobs] == ["RUNNING", "UNKNOWN", "PENDING"]
    assert [job.why for job in jobs] == ["", "gone", ""]
    assert [job.state() for job in jobs[:2]] == ["FAILED", "FAILED"] and jobs[1].why == ""


def test_waiting_outlives_an_outage_and_not_an_unknown_job(monkeypatch):
    down = UserError(Problem("launcher", "out of reach"))
    assert Asked("RUNNING", down, down, "SUCCEEDED").wait() is JobState.SUCCEEDED
    with pytest.raises(Forgotten):
        Asked(Forgotten("never was")).wait()
    monkeypatch.setattr(Asked, "patience", -1.0)
    with pytest.raises(UserError, match="out of reach"):
        Asked(down).wait()
    pauses = []
    monkeypatch.setattr(common.time, "sleep", pauses.append)
    for _, _ in zip(range(6), common.pace(1.0, 2.0), strict=False):
        pass
    assert pauses[:2] == [1.0, 1.3] and pauses[-1] == 2.0


def test_no_more_pages_are_read_than_there_are_jobs():
    read = []
    rows = [("a", "PENDING"), ("other", "RUNNING")]
    pages = (read.append(number) or rows for number in range(9))
    assert list(from_pages({"a": 1, "b": 2}, pages)) == [(1, "PENDING")] and read == [0, 1]


def test_files_are_fetched_manifests_last_and_newer_ones_stay(tmp_path):
    copied = []

    def download(name, path):
        copied.append(name)
        path.write_text("new")

    names = ("a.ckpt.manifest.json", "a.ckpt", "logs/x", "here", "../outside")
    (tmp_path / "here").write_text("old")
    files = {name: RemoteFile(3, 1000.0) for name in names}
    assert fetch_files(tmp_path, files, download) == 3
    assert copied == ["a.ckpt", "logs/x", "a.ckpt.manifest.json"]
    assert fetch_files(tmp_path, files, download) == 0
    os.utime(tmp_path / "a.ckpt", (999, 999))
    assert fetch_files(tmp_path, files, download) == 1
