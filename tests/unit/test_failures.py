"""Which of several failures is the cause: by what they say, and not by the clocks of hosts."""

from __future__ import annotations

import bdb
import logging
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from distdl.job import JobState
from distdl.launch import start
from distdl.ranks.stopping import state_of
from distdl.runs import failures
from distdl.runs.directory import Attempt, RunDirectory
from distdl.worker import agent, main

GLOO = "[/pytorch/third_party/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path / "attempts/001")


def ended(code: int, at: int) -> SimpleNamespace:
    """What torch's agent knows of a rank; in whole seconds."""
    return SimpleNamespace(exitcode=code, timestamp=at)


def test_a_lost_peer_comes_second_whatever_the_clock_says(attempt) -> None:
    attempt.record_error(0, "RuntimeError", GLOO, "", time=5.0, lost_peer=True)
    assert attempt.first_error()["rank"] == 0, "alone it is all there is"
    attempt.record_error(1, "ValueError", "bad weather", "", time=9.0)
    assert attempt.first_error()["rank"] == 1
    attempt.record_error(2, "ValueError", "worse", "", time=7.0)
    assert attempt.first_error()["rank"] == 2
    # A record of another shape, of a rank that died while it wrote, is passed over.
    for number, text in enumerate(("{", "[1]", "{}", '{"rank": 1, "time": "x"}'), 3):
        (attempt.errors / f"rank_{number}.json").write_text(text)
    assert attempt.first_error()["rank"] == 2


def test_a_killed_rank_is_recorded_by_its_agent(attempt) -> None:
    """Rank 0 lost its peer, rank 2 was killed by the agent when its time of grace was over."""
    attempt.record_error(0, "RuntimeError", GLOO, "", time=99.9, lost_peer=True)
    code = agent.blame(attempt, {0: ended(1, 100), 1: ended(-9, 100), 2: ended(-9, 131)})
    assert code == -9
    assert not (attempt.errors / "rank_2.json").exists()
    # Rank 0 took the agent's signal for a preemption.
    attempt.update(state="PREEMPTED", exit_code=75)
    assert attempt.conclude(JobState.FAILED, code) is JobState.FAILED
    status = attempt.status()
    assert status["error"].startswith("rank 1: killed by SIGKILL on ")
    assert status["exit_code"] == 137 and status["first_error"]["signal"] == "SIGKILL"


def test_a_rank_that_its_platform_saw_end_first(attempt) -> None:
    """Under srun: what rank 0 recorded before anybody looked follows from the kill."""
    attempt.record_error(0, "RuntimeError", "what no list of words knows", "", time=100.0)
    assert not failures.record_first_end(attempt.errors, 1, -signal.SIGTERM, "n2")
    assert failures.record_first_end(attempt.errors, 1, -signal.SIGKILL, "n2")
    first = attempt.first_error()
    assert (first["rank"], first["host"], first["signal"]) == (1, "n2", "SIGKILL")
    assert "killed by SIGKILL on n2" in failures.describe(first)
    assert failures.record_first_end(attempt.errors, 2, -signal.SIGSEGV, "n3")
    assert attempt.first_error()["rank"] == 1, "a crash may be a consequence"


def test_a_crash_after_a_failure_is_not_the_cause(attempt) -> None:
    attempt.record_error(1, "ValueError", "bad weather", "", time=100.7)
    for number in (signal.SIGSEGV, signal.SIGABRT):
        agent.blame(attempt, {1: ended(1, 100), 0: ended(-number, 100)})
        assert attempt.first_error()["rank"] == 1
    agent.blame(attempt, {2: ended(3, 90)})
    assert "ended with exit code 3 on" in failures.describe(attempt.first_error())


@pytest.mark.parametrize("code", [-signal.SIGTERM, -signal.SIGUSR1, 75])
def test_a_rank_that_was_told_to_end_is_no_failure(attempt, code) -> None:
    """Also in its first moments, before it could listen."""
    cause = agent.blame(attempt, {0: ended(code, 100), 1: ended(75, 100)})
    attempt.update(state="PENDING")
    assert attempt.first_error() is None
    assert attempt.conclude(state_of(cause), cause) is JobState.PREEMPTED
    assert attempt.status()["exit_code"] == 75


def test_what_came_first_in_a_chain_decides() -> None:
    def chained(first: Exception, second: Exception) -> Exception:
        try:
            try:
                raise first
            except Exception:
                raise second  # noqa: B904
        except Exception as error:
            return error

    gloo, mine = RuntimeError(GLOO), ValueError("bad weather")
    assert failures.is_consequence(gloo)
    assert failures.is_consequence(chained(RuntimeError(GLOO), RuntimeError("step 5 failed")))
    assert not failures.is_consequence(chained(mine, RuntimeError(GLOO)))


def test_causes_that_lead_back_are_looked_at_once() -> None:
    """Hydra wraps what a constructor raises, and whoever unwraps it closes a ring."""
    first, wrapped = ValueError("bad weather"), RuntimeError("Error in call to target")
    wrapped.__cause__, first.__context__ = first, wrapped
    assert not failures.is_consequence(first)


THEIRS = """
import ast
def training_step(error=None):
    if error: raise error
    ast.literal_eval("1 +")
"""


@pytest.mark.parametrize("in_loader", [False, True])
def test_the_last_word_is_where_in_the_users_code(
    attempt, tmp_path, monkeypatch, caplog, capsys, in_loader: bool
) -> None:
    """Below it are frames of what they call; a loader's worker sends its traceback as text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(main.sys.modules, "bad", raising=False)
    import bad  # type: ignore[import-not-found]

    with pytest.raises(SyntaxError) as raised:
        bad.training_step()
    error: BaseException = raised.value
    if in_loader:
        sent = "".join(main.traceback.format_exception(error))
        error = RuntimeError(f"Caught SyntaxError in DataLoader worker process 0.\n{sent}")
    assert main.note(attempt, 0, error) == 1
    where = "bad.py, line 5, in training_step"
    assert caplog.messages[-1].rstrip().endswith(f"at {where}")
    assert failures.describe(attempt.first_error()).endswith(f"(at {where})")


def test_what_is_to_be_typed_after_a_failure(attempt, tmp_path, monkeypatch, capsys) -> None:
    """A resume only where there is something to go on from."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create("seed: 1\n", {})
    where = {"run_id": "e/r", "where": {"launcher": {}}, "changes": {}}
    newest = run.begin_attempt(where)
    newest.end(JobState.FAILED)
    planned, command = SimpleNamespace(run=run), ["distdl", "seed=1", "name=r"]

    def said() -> str:
        start.print_next_command(planned, newest, JobState.FAILED, command)  # type: ignore[arg-type]
        return capsys.readouterr().out

    assert said().endswith("start it again:\n  python -m distdl seed=1 name=r\n")
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    (run.checkpoints / "epoch_000.manifest.json").mkdir()
    assert said() == "failed. To resume:\n  python -m distdl resume outputs/e/r\n"


def test_q_in_a_debugger_is_no_traceback(attempt, tmp_path, caplog, capsys) -> None:
    assert main.note(attempt, 0, bdb.BdbQuit()) == 1
    shown = [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    assert shown == ["ended in the debugger"] == [failures.describe(attempt.first_error())]
    start.print_next_command(None, attempt, JobState.FAILED, [])  # type: ignore[arg-type]
    assert not capsys.readouterr().out
