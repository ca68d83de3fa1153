"""Which of the recorded failures is the cause of an attempt's end."""

from __future__ import annotations

import runpy
import signal
import traceback
from types import SimpleNamespace

import pytest

from distdl.agent import agent
from distdl.runs import failures
from distdl.runs.directory import Attempt
from distdl.worker import failing

# What happens to an attempt, as functions that record it.


def failed(rank, time, **more):
    return lambda a: a.record_error(rank, "Error", "bad weather", "", time=time, **more)


def exits(codes):
    """What torch's agent knows: rank -> exit code and time, in complete seconds."""
    ends = {k: SimpleNamespace(exitcode=code, timestamp=at) for k, (code, at) in codes.items()}
    return lambda attempt: agent.record_kills(attempt, ends)


def platform_saw(rank, number, host):
    return lambda a: failures.record_first_end(a.errors, rank, -number, host)


def torn(attempt):
    """Records of another shape, of ranks that died while they wrote."""
    for number, text in enumerate(("{", "[1]", "{}", '{"rank": 1, "time": "x"}'), 3):
        (attempt.errors / f"rank_{number}.json").write_text(text)


KILL = signal.SIGKILL
SEGV = signal.SIGSEGV
TERM = signal.SIGTERM
CASES = [
    ([failed(1, 9.0), failed(2, 7.0), torn], 2, "bad weather"),
    ([failed(0, 2.0, enqueued=9), failed(1, 5.0, enqueued="few")], 0, "bad weather"),
    # Under srun: what rank 0 recorded before anybody looked follows from the kill.
    ([failed(0, 100.0), platform_saw(1, TERM, "n2")], 0, "bad weather"),
    # A crash may be a consequence.
    ([failed(0, 1.0), platform_saw(1, KILL, "n2"), platform_saw(2, SEGV, "n3")], 1, "KILL on n2"),
    ([failed(1, 100.7), exits({1: (1, 100), 0: (-SEGV, 100)})], 1, "bad weather"),
    ([failed(1, 100.7), exits({2: (3, 90)})], 2, "exit code 3 on"),
]


@pytest.fixture
def attempt(tmp_path) -> Attempt:
    return Attempt(tmp_path / "attempts/001")


@pytest.mark.parametrize(("events", "rank", "fragment"), CASES)
def test_the_cause(attempt, events, rank, fragment):
    for event in events:
        event(attempt)
    first = attempt.first_error()
    assert first["rank"] == rank
    assert fragment in failures.describe(first)


def test_what_came_first_in_a_chain_decides(attempt):
    def chained(first, second):
        second.__context__ = first
        return second

    mine = ValueError("bad weather")
    lost = RuntimeError("Connection closed by peer [127.0.0.1]")
    failing.record_failure(attempt, 0, chained(lost, RuntimeError("step 5 failed")))
    assert attempt.first_error()["lost_peer"]
    assert not failures.is_consequence(chained(mine, RuntimeError(str(lost))))
    # Hydra wraps what a constructor raises, and whoever unwraps it closes a ring.
    wrapped = chained(mine, RuntimeError("Error in call to target"))
    wrapped.__cause__ = mine
    mine.__context__ = wrapped
    assert not failures.is_consequence(mine)


def test_the_log_ends_with_the_line_of_the_users_code(attempt, tmp_path, monkeypatch, caplog):
    """Below it are frames of what they call; a loader's worker sends its traceback as text."""
    monkeypatch.chdir(tmp_path)
    code = "import ast\ndef training_step():\n    ast.literal_eval('1 +')\n"
    (tmp_path / "bad.py").write_text(code)
    bad = runpy.run_path(str(tmp_path / "bad.py"))
    with pytest.raises(SyntaxError) as raised:
        bad["training_step"]()
    sent = "".join(traceback.format_exception(raised.value))
    of_worker = RuntimeError(f"Caught SyntaxError in DataLoader worker process 0.\n{sent}")
    where = "at bad.py, line 3, in training_step"
    for rank, error in enumerate((raised.value, of_worker)):
        assert failing.record_failure(attempt, rank, error) == 1
        assert caplog.messages[-1].rstrip().endswith(where)
    shown = [failures.describe(error) for error in failures.recorded(attempt.errors)]
    assert len(shown) == 2
    assert all(text.endswith(f"({where})") for text in shown)
