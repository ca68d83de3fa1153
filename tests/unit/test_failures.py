"""Which of several failures is the cause: by what they say, and not by the clocks of hosts."""

from __future__ import annotations

import bdb
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from distdl.job import JobState
from distdl.launch import start
from distdl.ranks.stopping import state_after_exit
from distdl.runs import failures
from distdl.runs.directory import Attempt, RunDirectory
from distdl.worker import agent, main

GLOO = "[/pytorch/third_party/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


@pytest.fixture
def attempt(tmp_path) -> Attempt:
    return Attempt(tmp_path / "attempts/001")


Event = Callable[[Attempt], Any]


def failed(rank: int, time: float, message: str = "bad weather", **more: Any) -> Event:
    return lambda attempt: attempt.record_error(rank, "Error", message, "", time=time, **more)


def lost(rank: int, time: float) -> Event:
    return failed(rank, time, GLOO, lost_peer=True)


def hung(rank: int, time: float, **more: Any) -> Event:
    return lambda attempt: attempt.record_error(rank, "Hang", "late", "", 70, time=time, **more)


def exits(codes: Mapping[int, tuple[int, int]]) -> Event:
    """What torch's agent knows: rank -> exit code and time, in complete seconds."""
    ends = {k: SimpleNamespace(exitcode=code, timestamp=at) for k, (code, at) in codes.items()}
    return lambda attempt: agent.record_kills(attempt, ends)


def platform_saw(rank: int, number: int, host: str) -> Event:
    return lambda a: failures.record_first_end(a.errors, rank, -number, host)


def torn(attempt: Attempt) -> None:
    """Records of another shape, of ranks that died while they wrote."""
    for number, text in enumerate(("{", "[1]", "{}", '{"rank": 1, "time": "x"}'), 3):
        (attempt.errors / f"rank_{number}.json").write_text(text)


KILL, SEGV, ABRT, TERM = signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM


@pytest.mark.parametrize(
    ("events", "rank", "fragment"),
    [
        ([lost(0, 5.0)], 0, "closed by peer"),
        ([lost(0, 5.0), failed(1, 9.0)], 1, "bad weather"),
        ([lost(0, 5.0), failed(1, 9.0), failed(2, 7.0), torn], 2, "bad weather"),
        # One that only waited is not the cause; then the fewest collectives, then the clocks.
        ([hung(0, 1.0, waiting=True, enqueued=3), hung(1, 9.0, enqueued=4)], 1, "late"),
        ([hung(0, 1.0, enqueued=4), hung(1, 9.0, enqueued=3)], 1, "late"),
        ([hung(0, 1.0), failed(1, 9.0)], 1, "bad weather"),
        ([lost(0, 1.0), hung(1, 9.0, waiting=True)], 1, "late"),
        ([failed(0, 2.0, enqueued=9), failed(1, 5.0, enqueued="few")], 0, "bad weather"),
        # Under srun: what rank 0 recorded before anybody looked follows from the kill.
        ([failed(0, 100.0), platform_saw(1, TERM, "n2")], 0, "bad weather"),
        ([failed(0, 100.0), platform_saw(1, KILL, "n2")], 1, "killed by SIGKILL on n2"),
        # A crash may be a consequence.
        ([failed(0, 1.0), platform_saw(1, KILL, "n2"), platform_saw(2, SEGV, "n3")], 1, "KILL"),
        ([failed(1, 100.7), exits({1: (1, 100), 0: (-SEGV, 100)})], 1, "bad weather"),
        ([failed(1, 100.7), exits({1: (1, 100), 0: (-ABRT, 100)})], 1, "bad weather"),
        ([failed(1, 100.7), exits({2: (3, 90)})], 2, "exit code 3 on"),
    ],
)
def test_the_cause(attempt, events: list[Event], rank: int, fragment: str) -> None:
    for event in events:
        event(attempt)
    first = attempt.first_error()
    assert first and first["rank"] == rank and fragment.lower() in failures.describe(first).lower()


def test_a_killed_rank_is_recorded_by_its_agent(attempt) -> None:
    lost(0, 99.9)(attempt)
    code = exits({0: (1, 100), 1: (-9, 100), 2: (-9, 131)})(attempt)
    assert code == -9 and not (attempt.errors / "rank_2.json").exists()
    attempt.update(state="PREEMPTED", exit_code=75)  # rank 0 took the agent's signal for one
    assert attempt.conclude(JobState.FAILED, code) is JobState.FAILED
    status = attempt.status()
    assert status["error"].startswith("rank 1: ")
    assert status["exit_code"] == 137 and status["first_error"]["signal"] == "SIGKILL"


@pytest.mark.parametrize("code", [-signal.SIGTERM, -signal.SIGUSR1, 75])
def test_a_rank_that_was_asked_to_end_is_no_failure(attempt, code: int) -> None:
    """Also in its first moments, before it could listen."""
    cause = exits({0: (code, 100), 1: (75, 100)})(attempt)
    attempt.update(state="PENDING")
    assert attempt.first_error() is None
    assert attempt.conclude(state_after_exit(cause), cause) is JobState.PREEMPTED
    assert attempt.status()["exit_code"] == 75


def test_what_came_first_in_a_chain_decides(attempt) -> None:
    def chained(first: Exception, second: Exception) -> Exception:
        second.__context__ = first
        return second

    gloo, mine = RuntimeError(GLOO), ValueError("bad weather")
    assert failures.is_consequence(gloo)
    main.record_failure(attempt, 0, gloo)
    assert attempt.first_error()["lost_peer"]
    assert failures.is_consequence(chained(gloo, RuntimeError("step 5 failed")))
    assert not failures.is_consequence(chained(mine, RuntimeError(GLOO)))
    # Hydra wraps what a constructor raises, and whoever unwraps it closes a ring.
    wrapped = chained(mine, RuntimeError("Error in call to target"))
    wrapped.__cause__, mine.__context__ = mine, wrapped
    assert not failures.is_consequence(mine)


OWN_CODE = "import ast\ndef training_step():\n    ast.literal_eval('1 +')\n"


@pytest.mark.parametrize("in_loader", [False, True])
def test_the_log_ends_with_the_line_of_the_users_code(
    attempt, tmp_path, monkeypatch, caplog, in_loader: bool
) -> None:
    """Below it are frames of what they call; a loader's worker sends its traceback as text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(OWN_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad", raising=False)
    import bad  # type: ignore[import-not-found]

    with pytest.raises(SyntaxError) as raised:
        bad.training_step()
    error: BaseException = raised.value
    if in_loader:
        sent = "".join(traceback.format_exception(error))
        error = RuntimeError(f"Caught SyntaxError in DataLoader worker process 0.\n{sent}")
    assert main.record_failure(attempt, 0, error) == 1
    where = "at bad.py, line 3, in training_step"
    assert caplog.messages[-1].rstrip().endswith(where)
    assert failures.describe(attempt.first_error()).endswith(f"({where})")


def test_the_command_to_type_after_a_failure(tmp_path, monkeypatch, capsys) -> None:
    """A resume only where there is a checkpoint."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create("seed: 1\n", {})
    newest = run.begin_attempt({"run_id": "e/r", "where": {"launcher": {}}, "changes": {}})
    newest.end(JobState.FAILED)
    config = OmegaConf.create({"task": {"_target_": "distdl.tasks.train"}})
    planned: Any = SimpleNamespace(run=run, config=config)
    for command in ("seed=1 name=r", "resume outputs/e/r"):
        start.print_next_command(planned, newest, JobState.FAILED, ["distdl", "seed=1", "name=r"])
        assert capsys.readouterr().out.endswith(f":\n  python -m distdl {command}\n")
        (run.checkpoints / "epoch_000.manifest.json").mkdir(parents=True, exist_ok=True)


def test_q_in_a_debugger_is_no_traceback(attempt, caplog, capsys) -> None:
    assert main.record_failure(attempt, 0, bdb.BdbQuit()) == 1
    shown = [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    assert shown == ["ended in the debugger"] == [failures.describe(attempt.first_error())]
    start.print_next_command(None, attempt, JobState.FAILED, [])  # type: ignore[arg-type]
    assert not capsys.readouterr().out
