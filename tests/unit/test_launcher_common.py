"""What launchers share: settings as validation sees them, waiting, pages of a list, far files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from distdl.job import JobState
from distdl.launchers import common
from distdl.launchers.common import AskedJob, FarFile, Forgotten, fetch_files, from_pages
from distdl.util.errors import Problem, UserError


def test_validation_reports_keys_types_ranges_and_misfits_at_once() -> None:
    """Through the same `Binding` that the child process runs."""
    from distdl.validation.child import Binding

    wrong = {"gpuss": 1, "mem": 4, "grace_seconds": 0, "walltime": "1:30", "requeue": False}
    node = {"_target_": "distdl.launchers.slurm.SlurmLauncher", **wrong}
    context = {"local": False, "num_nodes": 1, "devices": 1, "accelerator": "cpu"}
    binding = Binding(
        {
            "config": {"launcher": {**node, "requeue_at_time_limit": True}},
            "supplied": {},
            "context": context,
            "trust": [[], []],
            "expressions": [],
        }
    )
    binding.run()
    found = {
        each.path.removeprefix("launcher."): f"{each.what} | {each.remedy}"
        for each in binding.problems
    }
    assert set(found) == {"gpuss", "mem", "grace_seconds", "walltime", "requeue_at_time_limit"}
    assert "did you mean launcher.gpus?" in found["gpuss"]


class Asked(AskedJob):
    poll_seconds = 0.0
    handle = "x://1"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def _look(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @classmethod
    def _listed(cls, jobs: Any) -> Any:
        yield from zip(jobs, [JobState.RUNNING, UserError("gone")], strict=False)

    def _meaning(self, answer: Any) -> JobState:
        return JobState(answer)


def test_one_answer_to_ask_is_used_once() -> None:
    jobs = [Asked("FAILED"), Asked("FAILED"), Asked("PENDING")]
    Asked.ask(jobs)
    assert [job.state() for job in jobs] == ["RUNNING", "UNKNOWN", "PENDING"]
    assert [job.why for job in jobs] == ["", "gone", ""]
    assert [job.state() for job in jobs[:2]] == ["FAILED", "FAILED"] and jobs[1].why == ""


def test_waiting_outlives_an_outage_and_not_a_job_that_nobody_knows(monkeypatch) -> None:
    down = UserError(Problem("launcher", "out of reach"))
    assert Asked("RUNNING", down, down, "SUCCEEDED").wait() is JobState.SUCCEEDED
    with pytest.raises(Forgotten):
        Asked(Forgotten("never was")).wait()
    monkeypatch.setattr(Asked, "patience", -1.0)
    with pytest.raises(UserError, match="out of reach"):
        Asked(down).wait()


def test_pauses_grow_up_to_the_longest(monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(common.time, "sleep", slept.append)
    for _, _ in zip(range(6), common.pace(1.0, 2.0), strict=False):
        pass
    assert slept[:2] == [1.0, 1.3] and slept[-1] == 2.0


def test_no_more_pages_are_read_than_there_are_jobs() -> None:
    read: list[int] = []

    def pages() -> Any:
        for number in range(9):
            read.append(number)
            yield [(f"other{number}", "RUNNING"), ("a", "PENDING")]

    assert list(from_pages({"a": 1, "b": 2}, pages())) == [(1, "PENDING")] and read == [0, 1]


def test_files_are_fetched_manifests_last_and_what_is_newer_here_stays(tmp_path: Path) -> None:
    copied: list[str] = []

    def download(name: str, path: Path) -> None:
        copied.append(name)
        path.write_text("new")

    names = ("a.ckpt.manifest.json", "a.ckpt", "logs/x", "here", "../outside")
    (tmp_path / "here").write_text("old")
    files = {name: FarFile(3, 1000.0) for name in names}
    assert fetch_files(tmp_path, files, download) == 3
    assert copied == ["a.ckpt", "logs/x", "a.ckpt.manifest.json"]
    assert fetch_files(tmp_path, files, download) == 0
    os.utime(tmp_path / "a.ckpt", (999, 999))
    assert fetch_files(tmp_path, files, download) == 1
