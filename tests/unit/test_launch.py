"""A request is made once: before anything is written, for the attempt that then is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distdl.config import compose
from distdl.job import JobSpec, JobState
from distdl.launch import jobs, planning, start


class Counting:
    """A launcher that keeps the numbers of the attempts that it was asked for."""

    def __init__(self) -> None:
        self.requests: list[list[int]] = []
        self.meanwhile: Any = lambda: None

    def request(self, spec: JobSpec) -> str:
        return self.request_sweep([spec])

    def request_sweep(self, specs: list[JobSpec]) -> str:
        self.requests.append([spec.attempt for spec in specs])
        return "request"

    def reach(self, request: str) -> None:
        self.meanwhile()

    def submit(self, request: str) -> Any:
        jobs = [SimpleNamespace(handle="counting://1", url=None) for _ in self.requests[-1]]
        return jobs if len(jobs) > 1 else jobs[0]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, without_stage_2: None) -> Counting:
    monkeypatch.chdir(tmp_path)
    counting = Counting()
    monkeypatch.setattr(jobs, "instantiate", lambda node: counting)
    monkeypatch.setattr(start, "is_foreground", lambda config: False)
    monkeypatch.setattr(start, "snapshot_of", lambda planned: None)
    return counting


def planned(name: str) -> planning.Plan:
    typed = ["model=resnet18", "data=synthetic", "trainer.accelerator=cpu", f"name={name}"]
    return planning.plan(compose.compose(typed))


def test_once_for_a_run_and_for_a_sweep(launcher: Counting, capsys) -> None:
    attempt, _ = start.submit(planned("a"), ["distdl"])
    assert launcher.requests == [[1]] and attempt.number == 1
    start.submit_sweep([planned("b"), planned("c")], ["distdl"])
    assert launcher.requests[1:] == [[1, 1]]
    assert capsys.readouterr().out.count("submitted  counting://1  outputs/default/") == 2


def test_anew_where_another_start_took_the_number(launcher: Counting) -> None:
    mine = planned("a")

    def other_start() -> None:
        start.create_attempt(mine, ["distdl"], None).end(JobState.FAILED)

    launcher.meanwhile = other_start
    attempt, _ = start.submit(mine, ["distdl"])
    assert launcher.requests == [[1], [2]] and attempt.number == 2
