"""Whether a run that failed is started again, and when: budget, pauses, the same failure."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from distdl.incident import incident
from distdl.job import JobState
from distdl.launch import retrying
from distdl.launch.retrying import Retries
from distdl.runs import files
from distdl.runs.directory import RunDirectory
from tests.limits import small_disk

FAILED, PREEMPTED = JobState.FAILED, JobState.PREEMPTED
BUG = {"step": 3, "type": "ValueError", "where": "mine.py, line 9, in forward"}
ELSEWHERE = {**BUG, "where": "mine.py, line 12, in f"}
KILLED = {"step": 3, "type": "Killed", "message": "killed by SIGKILL on node1"}
FULL = {"step": 3, "type": "OSError", "message": "[Errno 28] No space left on device: 'last'"}
EARLY = {"type": "KeyError"}  # before the first step


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create("seed: 1\n", {"command": ["python", "-m", "distdl"]})
    return run


def attempted(run: RunDirectory, error: dict[str, Any], state: JobState, reached: int) -> Any:
    """An attempt that ended so, with a checkpoint of the step `reached` (0: none)."""
    size = {"num_nodes": 1, "devices": 1, "accelerator": "cpu", "device_ids": None}
    attempt = run.begin_attempt({"run_id": "e/r", "where": {}, "resources": size})
    fields = {"message": "bad weather", **error}
    if state is FAILED:
        attempt.record_error(0, fields.pop("type"), fields.pop("message"), "", **fields)
    attempt.end(state)
    if reached:
        path = run.checkpoints / f"step_{reached}.ckpt.manifest.json"
        entries = {f"step_{reached}.ckpt": {"size": 1, "sha256": ""}}
        files.write_json(path, {"files": entries, "step": reached, "created": float(reached)})
    return attempt


def pauses(run: RunDirectory, budget: int, *ends: tuple[dict[str, Any], JobState, int]) -> list:
    retries = Retries(run, budget)
    found = []
    for error, state, reached in ends:
        attempt = attempted(run, error, state, reached)
        found.append(retries.pause(attempt, state, incident.read(attempt)))
    return found


BUGS = [{**BUG, "step": step} for step in range(9)]
DIFFERENT = [(bug, FAILED, 0) for bug in BUGS]
CASES = {
    "no budget": (0, [(BUG, FAILED, 0)], [None]),
    "the pauses grow": (8, DIFFERENT, [0, 2, 4, 8, 16, 32, 60, 60, None]),
    "progress gives it back": (1, [(bug, FAILED, step) for step, bug in enumerate(BUGS)], [0] * 9),
    "the same checkpoint is none": (1, [(bug, FAILED, 5) for bug in BUGS[:2]], [0, None]),
    "no pause after a preemption": (3, [({}, PREEMPTED, 0)] * 4, [0, 0, 0, None]),
    "the same failure twice": (9, [(BUG, FAILED, 0), (BUG, FAILED, 0)], [0, None]),
    "also with progress": (9, [(BUG, FAILED, 1), (BUG, FAILED, 2)], [0, None]),
    "also before the first step": (9, [(EARLY, FAILED, 0), (EARLY, FAILED, 0)], [0, None]),
    "an unknown step with progress": (9, [(EARLY, FAILED, 1), (EARLY, FAILED, 2)], [0, 0]),
    "at another line": (9, [(BUG, FAILED, 0), (ELSEWHERE, FAILED, 0)], [0, 2]),
    "another error": (9, [(BUG, FAILED, 0), ({**BUG, "type": "OSError"}, FAILED, 0)], [0, 2]),
    "one between them": (9, [(BUG, FAILED, 0), DIFFERENT[7], (BUG, FAILED, 0)], [0, 2, 4]),
    "kills are chance": (9, [(KILLED, FAILED, 0)] * 3, [0, 2, 4]),
    "a full disk may be freed": (2, [(FULL, FAILED, 0)] * 3, [60, 60, None]),
    "also after progress": (2, [(FULL, FAILED, 1), (FULL, FAILED, 2)], [60, 60]),
}


@pytest.mark.parametrize("case", CASES)
def test_when_it_is_started_again(case: str, run: RunDirectory) -> None:
    budget, ends, expected = CASES[case]
    assert pauses(run, budget, *ends) == expected


def test_it_says_why_it_is_not(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert pauses(run, 9, (BUG, FAILED, 0), (BUG, FAILED, 0)) == [0, None]
    why = (
        "not started again: it failed twice at step 3 with the same error: ValueError"
        " (mine.py, line 9, in forward)"
    )
    last = run.last_attempt()
    assert last is not None
    assert capsys.readouterr().err == f"{why}\n"
    assert why in (last.path / incident.MARKDOWN).read_text()
    assert files.read_json(last.path / incident.JSON)["not_restarted"] == why
    pauses(run, 1, (BUG, FAILED, 0), ({**BUG, "type": "OSError"}, FAILED, 0))
    spent = "not started again: launcher.max_attempts=1, and there was no new checkpoint"
    assert capsys.readouterr().err == f"{spent}\n"
    first = incident.read(run.attempts()[0])
    assert first is not None
    assert "Restarts" not in incident.markdown(first)


def test_it_waits(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(retrying.time, "sleep", waited.append)
    retries = Retries(run, 2)
    again = [retries.again(attempted(run, *each), FAILED) for each in DIFFERENT[:3]]
    assert again == [True, True, False]
    assert waited == [0, 2]


def test_a_full_disk_is_waited_for_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each minute of waiting costs one of the starts. The disk is freed in the second minute, and
    the run starts again. Then it stays full until no start is left."""
    waited: list[float] = []
    with small_disk(tmp_path / "disk"):
        filled = tmp_path / "disk/filled"

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 2:
                filled.unlink()

        monkeypatch.setattr(retrying.time, "sleep", sleep)
        run = RunDirectory(tmp_path / "disk/outputs/e/r")
        run.create("seed: 1\n", {"command": ["python", "-m", "distdl"]})
        retries = Retries(run, 3)
        attempt = attempted(run, FULL, FAILED, 0)
        with suppress(OSError):
            filled.write_bytes(bytes(2 << 20))
        assert retries.again(attempt, FAILED)
        assert waited == [60, 60]
        told = "failed: starting again in 60 s (2 more); disk is full: free space until then, "
        assert told in capsys.readouterr().err
        with suppress(OSError):
            filled.write_bytes(bytes(2 << 20))
        assert not Retries(run, 2).again(attempt, FAILED)
        assert waited[2:] == [60, 60]
        spent = "not started again: launcher.max_attempts=2, and there was no new checkpoint"
        assert spent in capsys.readouterr().err
