"""The report of a failed attempt, from the files that its ranks have left: which rank, and why."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import pytest

from distdl.health import incident
from distdl.job import JobState
from distdl.launch import start
from distdl.runs import failures, files
from distdl.runs.directory import Attempt, RunDirectory

NET = "net.py, line 12, in forward"
REDUCE = {"op": "all_reduce", "sizes": [[32, 32]], "where": "net.py, line 3, in f"}
GLOO = "[/pytorch/third_party/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
NBYTES = "[enforce fail at pair.cc:453] op.preamble.length <= op.nbytes. 4096 vs 4"
PIPED: dict[str, Any] = {"capture_output": True, "text": True}
CANARY = "canary-0d9f61e2"


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """A failed attempt of two ranks, without any file of theirs."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create("seed: 1\n", {"command": ["python", "-m", "distdl", "seed=1", "name=a b"]})
    size = {"num_nodes": 1, "devices": 2, "accelerator": "cpu", "device_ids": None}
    attempt = run.begin_attempt({"run_id": "e/r", "where": {}, "resources": size})
    attempt.end(JobState.FAILED)
    return attempt


def failed(
    attempt: Attempt, rank: int, kind: str, message: str = "bad weather", **more: Any
) -> None:
    fields: dict[str, Any] = {"host": f"node{rank}", "trace": "", **more}
    attempt.record_error(rank, kind, message, fields.pop("trace"), **fields)


def hung(attempt: Attempt, rank: int, **more: Any) -> None:
    failed(attempt, rank, "Hang", "no progress for 60 s", exit_code=70, **more)


def seen(attempt: Attempt, rank: int, /, **fields: Any) -> None:
    usual: dict[str, Any] = {
        "rank": rank,
        "host": f"node{rank}",
        "world_size": 2,
        "how": "hang",
        "age": 60.0,
        "step": 7,
        "epoch": 1,
        "batch": 3,
        "samples": [5, 9],
        "phase": "forward",
        "action": "training_step",
        "where": NET,
        "process": "sleeping",
        "wchan": "do_epoll_wait",
        "memory": {"rss": 2**30, "oom_kills": 0},
        "disk": {"run": 2**30},
        "enqueued": 40,
        "collective": None,
        "last": REDUCE,
    }
    files.write_json(attempt.path / f"health/rank_{rank}.json", {**usual, **fields})


def waits(attempt: Attempt, rank: int = 0, **fields: Any) -> None:
    """A rank that waits in a collective: its record and its sight."""
    hung(attempt, rank, waiting=True, enqueued=fields.get("enqueued", 41))
    usual = {"phase": "backward", "collective": REDUCE, "enqueued": 41}
    seen(attempt, rank, **{**usual, **fields})


def reported(attempt: Attempt) -> incident.Incident:
    report = incident.write(attempt)
    assert report is not None
    return report


RUNTIME = "RuntimeError"
MESSAGES = [
    ("/dev/shm is full", RUNTIME, "DataLoader worker (pid 7) is killed by signal: Bus error. It"),
    ("disk is full", "OSError", "[Errno 28] No space left on device: 'a.ckpt'"),
    ("disk is full", RUNTIME, "[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0"),
    ("out of memory (GPU)", "OutOfMemoryError", "CUDA out of memory. Tried to allocate"),
    ("out of memory (host)", "MemoryError", "Unable to allocate 9 GiB"),
    ("data worker killed", RUNTIME, "DataLoader worker (pid 4711) is killed by signal: Killed. "),
    ("not a number", RUNTIME, "Function 'MulBackward0' returned nan values in its 0th output."),
    ("CUDA error", "AcceleratorError", "CUDA error: an illegal memory access"),
    ("NCCL transport", "DistBackendError", "NCCL error: unhandled system error"),
    ("exit", "Ended", "ended with exit code 3 on node1, without an error message"),
    ("killed", "Killed", "killed by SIGSEGV on node1"),
    ("exception", "ValueError", "bad weather"),
    ("exception", "KeyError", "'banana'"),  # has nan in it
]


@pytest.mark.parametrize(("cause", "kind", "message"), MESSAGES)
def test_the_cause_of_an_exception(attempt, cause: str, kind: str, message: str) -> None:
    """The other rank lost its peer, and its clock is ahead."""
    failed(attempt, 0, "RuntimeError", GLOO, lost_peer=True, time=1.0)
    failed(attempt, 1, kind, message, where=NET)
    report = reported(attempt)
    assert (report.rank, report.cause, report.host, report.where) == (1, cause, "node1", NET)
    assert report.title.startswith("rank 1 failed first: ") and report.title.endswith("(node1)")
    assert report.waiting == "rank 0 waits for it"
    assert " ".join(message.split()) in report.evidence


def test_what_led_to_an_exception_counts(attempt) -> None:
    trace = (
        "Traceback (most recent call last):\n"
        '  File "a.py", line 1, in save\n'
        "OSError: [Errno 28] No space left on device\n\n"
        "Traceback (most recent call last):\n"
        "RuntimeError: the checkpoint was not written\n"
    )
    failed(attempt, 1, "RuntimeError", "the checkpoint was not written", trace=trace)
    assert reported(attempt).cause == "disk is full"


KILLS: list[tuple[dict[str, int], str, str]] = [
    ({"oom_kills": 1}, "SIGKILL", "out of memory (killed)"),
    ({"oom_kills": 0, "available": 2**20}, "SIGKILL", "out of memory (killed)"),
    ({"oom_kills": 0, "used": 2**30, "limit": 2**30}, "SIGKILL", "killed"),  # the page cache
    ({}, "SIGKILL", "killed"),
    ({"oom_kills": 1}, "SIGSEGV", "killed"),
    # Only its monitor has seen that it is gone.
    ({"oom_kills": 1}, "", "out of memory (killed)"),
    ({}, "", "killed"),
]


@pytest.mark.parametrize(("memory", "signal", "cause"), KILLS)
def test_a_killed_rank(attempt, memory, signal: str, cause: str) -> None:
    if signal:
        failures.record_end(attempt.errors, 1, -Signals[signal], time.time(), "node1")
    failed(attempt, 0, "RuntimeError", GLOO, lost_peer=True)
    seen(attempt, 1, how="died", process="", memory=memory, collective=REDUCE)
    report = reported(attempt)
    assert (report.rank, report.cause, report.step, report.where) == (1, cause, 7, NET)


# What rank 0 was doing when gloo aborted it, while rank 1 was in the backward of step 7, batch 3.
ABORTS: dict[str, tuple[int, dict[str, Any]]] = {
    "skipped collective": (1, {"phase": "forward"}),
    "mismatched collective": (1, {"phase": "backward"}),
    "uneven batches": (0, {"phase": "callbacks", "action": "fit_loop.on_advance_end", "batch": 2}),
}


@pytest.mark.parametrize("cause", ABORTS)
@pytest.mark.parametrize("by_agent", [True, False])
def test_a_rank_that_gloo_has_aborted(attempt, cause: str, by_agent: bool) -> None:
    rank, fields = ABORTS[cause]
    if by_agent:
        failed(attempt, 0, "Killed", "killed by SIGABRT on node0", signal="SIGABRT")
    failed(attempt, 1, "RuntimeError", GLOO, lost_peer=True)
    seen(attempt, 0, how="aborted", collective={"op": "a collective", "where": NET}, **fields)
    seen(attempt, 1, how="failed", phase="backward")
    report = reported(attempt)
    assert (report.rank, report.cause) == (rank, cause)
    assert rank == 0 or f"rank 0 waits for it in a collective ({NET})" == report.waiting


GRADIENT = {"op": "all_reduce", "sizes": [[9]], "where": ""}
# What rank 1 was seen doing, while rank 0 waited in the backward of step 7, batch 3 of epoch 1.
HANGS: dict[str, tuple[str, dict[str, Any]]] = {
    "SIGSTOP": ("stopped", {"process": "stopped", "collective": REDUCE}),
    "a loader's worker": (
        "data worker blocked",
        {"phase": "data", "workers": [{"pid": 9}, {"pid": 8, "where": NET}], "where": ""},
    ),
    "a lock": ("lock", {"wchan": "futex_wait_queue"}),
    "a lock after the epoch": ("lock", {"wchan": "futex_wait", "phase": "validation", "batch": 2}),
    "a loop": ("endless loop", {"process": "running", "wchan": ""}),
    "a loop in C": ("endless loop", {"process": "running", "wchan": "", "enqueued": None}),
    "a sleep": ("blocked", {"wchan": "hrtimer_nanosleep"}),
    "a disk": ("blocked", {"process": "disk-sleep"}),
    "a kernel that says nothing": ("blocked", {"process": "", "wchan": ""}),
    "a rank that goes on": ("slow rank", {"age": 4.0, "process": "running"}),
}


@pytest.mark.parametrize("case", HANGS)
def test_the_cause_of_a_hang(attempt, case: str) -> None:
    cause, fields = HANGS[case]
    waits(attempt)
    hung(attempt, 1, enqueued=40)
    seen(attempt, 1, **fields)
    report = reported(attempt)
    assert (report.rank, report.cause, report.step, report.where) == (1, cause, 7, NET)
    phase = fields.get("phase", "forward")
    assert report.title == f"rank 1 did not come: step 7, {phase}, {NET}   (node1)"
    call = "all_reduce of 1024 values (net.py, line 3, in f)"
    assert report.waiting == f"rank 0 waits for it in {call}"


COLLECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "another shape": ("mismatched collective", {"collective": {**REDUCE, "sizes": [[4]]}}),
    "another call": ("mismatched collective", {"collective": {**REDUCE, "op": "broadcast"}}),
    "one was skipped": ("skipped collective", {"phase": "optimizer", "collective": GRADIENT}),
    "one step further": ("skipped collective", {"step": 8, "phase": "forward"}),
    "the end of the epoch": (
        "uneven batches",
        {
            "phase": "callbacks",
            "action": "fit_loop.on_advance_end",
            "batch": 2,
            "collective": GRADIENT,
        },
    ),
    "validation": (
        "uneven batches",
        {"phase": "validation", "batch": 2, "collective": GRADIENT},
    ),
    "the next epoch": ("uneven batches", {"epoch": 2, "batch": 1, "phase": "forward"}),
    "the end of the training": ("uneven batches", {"phase": "end", "epoch": None}),
    "a step of validation, with as many batches": (
        "skipped collective",
        {"phase": "validation", "collective": GRADIENT},
    ),
}


@pytest.mark.parametrize("case", COLLECTIVES)
@pytest.mark.parametrize("raises", [False, True])
def test_all_ranks_wait_in_collectives(attempt, case: str, raises: bool) -> None:
    """gloo hangs, or raises on the rank that gets more than it asked for: here the innocent one."""
    cause, fields = COLLECTIVES[case]
    waits(attempt, 1, **fields)
    if raises:
        failed(attempt, 0, "RuntimeError", NBYTES)
        seen(attempt, 0, how="failed", phase="backward")
    else:
        waits(attempt, 0)
    report = reported(attempt)
    assert (report.rank, report.cause, report.where) == (1, cause, NET)


def test_of_many_ranks_the_odd_one(attempt) -> None:
    for rank in (0, 2, 3):
        waits(attempt, rank, world_size=4)
    waits(attempt, 1, world_size=4, collective={**REDUCE, "sizes": [[4]]})
    report = reported(attempt)
    assert (report.rank, report.cause) == (1, "mismatched collective")
    assert "rank 1 was in all_reduce of 4 values" in report.evidence
    assert report.waiting.startswith("ranks 0, 2, 3 wait for it in all_reduce of 1024 values")


def heard(*fresh: int, silent: int = 1, **fields: Any) -> dict[str, Any]:
    last = {"rank": silent, "host": "node1", "step": 7, "where": NET, "age": 1.0, "fresh": False}
    peers = {str(rank): {"rank": rank, "age": 1.0, "fresh": True} for rank in fresh}
    return {**peers, str(silent): {**last, "phase": "forward", **fields}}


def test_a_lost_host(attempt) -> None:
    """It left nothing: what is known was heard by the others."""
    waits(attempt, 0, world_size=3, peers=heard(2))
    waits(attempt, 2, world_size=3, peers=heard(0))
    report = reported(attempt)
    assert (report.rank, report.cause, report.host) == (1, "lost host", "node1")
    assert report.title == f"rank 1 did not come: step 7, forward, {NET}   (node1)"
    assert [row["state"] for row in report.ranks][1] == "left nothing"


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_host_that_was_cut_off_reports_too(attempt, lost: int) -> None:
    """It hears nobody, and the other two hear each other."""
    for rank in range(3):
        first, second = (other for other in range(3) if other != rank)
        if rank == lost:
            peers = {**heard(silent=first), **heard(silent=second)}
        else:
            peers = heard(second if first == lost else first, silent=lost)
        waits(attempt, rank, world_size=3, peers=peers)
    assert (reported(attempt).rank, reported(attempt).cause) == (lost, "lost host")


LOST = partial(failed, kind="RuntimeError", message=GLOO, lost_peer=True)


def raised(time: float, enqueued: int) -> Any:
    return partial(failed, kind="ValueError", time=time, enqueued=enqueued)


# The rank and the cause that are named, and what the ranks left.
JOBS: list[tuple[int, str, list[Any]]] = [
    (0, "skipped collective", [partial(waits, phase="optimizer", collective=GRADIENT), waits]),
    (1, "skipped collective", [partial(waits, phase="end", peers=heard(phase="end"))]),
    (0, "connection", [LOST, LOST]),
    (0, "connection", [partial(waits, peers=heard(other, silent=7)) for other in (1, 0)]),
    # Fewer collectives count more than clocks, and a message more than both.
    (1, "exception", [partial(hung, time=1.0, enqueued=3), raised(3.0, 57), raised(2.0, 58)]),
]


@pytest.mark.parametrize(("rank", "cause", "leave"), JOBS)
def test_which_rank_and_why(attempt, rank: int, cause: str, leave: list[Any]) -> None:
    for number, each in enumerate(leave):
        each(attempt, number)
    assert (reported(attempt).rank, reported(attempt).cause) == (rank, cause)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (JobState.CANCELLED, None),
        (JobState.PREEMPTED, None),
        (JobState.SUCCEEDED, ("ValueError", 1)),
        (JobState.FAILED, ("UserError", 2)),
        (JobState.FAILED, ("BdbQuit", 1)),
        (JobState.FAILED, None),
    ],
)
def test_no_rank_failed(attempt, state: JobState, error, capsys) -> None:
    if error:
        failed(attempt, 0, error[0], exit_code=error[1])
    attempt.end(state, concluded=True)
    assert incident.write(attempt) is None
    assert not list(attempt.path.glob("incident.*"))
    start.report_failure(attempt)
    assert not capsys.readouterr().err


def test_the_screen(attempt, capsys) -> None:
    waits(attempt)
    seen(attempt, 1, process="running", samples=[*range(9)])
    (attempt.logs).mkdir()
    (attempt.logs / "rank_1.log").write_text("one\ntwo\n")
    start.report_failure(attempt)
    lines = capsys.readouterr().err.splitlines()
    assert lines == incident.head(reported(attempt)).splitlines()[:-1]
    assert len(lines) <= 7
    assert lines[0] == f"rank 1 did not come: step 7, forward, {NET}   (node1)"
    assert lines[3] == "  samples 0, 1, 2, 3, 4, 5, 6, 7, ... (9 in this rank's batch)"
    assert lines[5:] == [
        "  log     outputs/e/r/attempts/001/logs/rank_1.log",
        "  report  outputs/e/r/attempts/001/incident.md",
    ]


def test_the_command_to_type(attempt) -> None:
    """A resume only where there is a checkpoint."""
    failed(attempt, 0, "ValueError")
    assert reported(attempt).next == "python -m distdl seed=1 'name=a b'"
    run = RunDirectory(attempt.path.parents[1])
    (run.checkpoints / "epoch_000.ckpt.manifest.json").mkdir(parents=True)
    assert reported(attempt).next == "python -m distdl resume outputs/e/r"


@pytest.mark.parametrize(("rank", "folder"), [(1, "agent"), (3, "agent-1")])
def test_the_last_lines_of_the_rank(attempt, rank: int, folder: str) -> None:
    """Of its log, and of what it printed, which its node's agent writes: two ranks per node."""
    failed(attempt, rank, "ValueError")
    for path in (f"{folder}/x/attempt_0/{local}" for local in (0, 1)):
        (attempt.logs / path).mkdir(parents=True)
        (attempt.logs / path / "stderr.log").write_text(f"printed in {path}\n")
    text = "".join(f"line {n}\n" for n in range(100_000))
    (attempt.logs / f"rank_{rank}.log").write_text(text)
    tail = [f"line {n}" for n in range(100_000 - 12, 100_000)]
    assert reported(attempt).log_tail == [*tail, f"printed in {folder}/x/attempt_0/1"]


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "half": b'{"rank": 1, "step": 4',
    "a list": b"[1]",
    "deep": b"[" * 100_000,
    "long numbers": b'{"rank": 1, "peers": {"' + b"9" * 5000 + b'": {}, "-1": {}, "\xc2\xb2": {}}}',
    "deep inside": b'{"rank": 1, "peers": '
    + b'{"1": {"peers": ' * 500
    + b"{}"
    + b"}}" * 500
    + b"}",
    "no text": b"\xff\xfe\x00",
    "too large": b'{"rank": 1, "phase": "' + b"x" * (1 << 20) + b'"}',
    "numbers": b'{"rank": 1, "step": 1e999, "world_size": 1000000000000, "age": NaN, "epoch": -1}',
    "another rank's": b'{"rank": 5, "world_size": 64}',
    "no rank's": b'{"rank": "one"}',
    "types": b'{"rank": 1, "host": [1], "memory": {"rss": "x"}, "peers": {"x": 1}, "where": {}}',
}


@pytest.mark.parametrize("case", HOSTILE)
def test_damaged_and_hostile_files(attempt, case: str) -> None:
    """What can be read counts."""
    waits(attempt, 0, peers=heard())
    (attempt.path / "health/rank_1.json").write_bytes(HOSTILE[case])
    hung(attempt, 1, where=NET)
    (attempt.errors / "rank_2.json").write_bytes(HOSTILE[case])
    report = reported(attempt)
    assert (report.rank, report.where, len(report.ranks)) == (1, NET, 2)
    assert report.phase in ("", "forward")  # the one that the other rank has heard
    assert json.loads((attempt.path / "incident.json").read_text())["rank"] == 1


@pytest.mark.parametrize("field", ["host", "where", "action", "phase", "process", "how"])
def test_text_of_a_file_is_only_text(attempt, field: str) -> None:
    text = "a\x1b[2J\r\n```\n# <b>|![x](http://e)\u202e````"
    waits(attempt)
    hung(attempt, 1)
    seen(attempt, 1, **{field: text})
    (attempt.path / "logs").mkdir()
    (attempt.path / "logs/rank_1.log").write_text(f"log\n`````\n{text}\n")
    report = reported(attempt)
    shown = incident.head(report) + (attempt.path / "incident.md").read_text()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", shown)
    assert len(incident.head(report).splitlines()) <= 8
    for line in (attempt.path / "incident.md").read_text().splitlines():
        assert not line or line.startswith("    ") or re.fullmatch(r"## [\w :()]+", line), line


def test_links_are_not_followed(attempt, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(CANARY)
    (tmp_path / "sight").write_text(json.dumps({"rank": 1, "where": CANARY}))
    failed(attempt, 1, "ValueError")
    for name, target in {"logs/rank_1.log": "secret", "health/rank_1.json": "sight"}.items():
        (attempt.path / name).parent.mkdir(exist_ok=True)
        (attempt.path / name).symlink_to(tmp_path / target)
    os.mkfifo(attempt.path / "health/rank_0.json")
    (attempt.path / "incident.md").symlink_to(tmp_path / "secret")
    reported(attempt)
    assert (tmp_path / "secret").read_text() == CANARY
    written = [path for path in attempt.path.glob("incident.*") if CANARY in path.read_text()]
    assert not written


def test_a_thousand_ranks(attempt) -> None:
    """The time is linear in their number."""
    for rank in range(1000):
        waits(attempt, rank, world_size=1001, peers=heard(silent=1000))
    begin = time.process_time()
    report = reported(attempt)
    assert time.process_time() - begin < 10
    assert (report.rank, report.cause) == (1000, "lost host")
    assert report.waiting.startswith("ranks 0, 1, 2, 3 and 996 more wait for it in all_reduce")


def test_a_copied_run_names_its_own_paths(attempt, tmp_path: Path, monkeypatch) -> None:
    run = attempt.path.parents[1]
    failed(attempt, 1, "OSError", f"cannot read {run}/checkpoints/a.ckpt")
    run.rename(tmp_path / "copy")
    report = reported(Attempt(tmp_path / "copy/attempts/001"))
    assert f"cannot read {tmp_path}/copy/checkpoints/a.ckpt" in report.evidence
    assert report.report == "copy/attempts/001/incident.md"


def test_a_full_disk_hides_no_failure(attempt, monkeypatch, capsys) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    failed(attempt, 1, "ValueError")
    monkeypatch.setattr(files, "write_bytes", full)
    start.report_failure(attempt)
    shown = capsys.readouterr().err
    assert "rank 1 failed first: ValueError: bad weather" in shown and "report" not in shown


FILLED = """
import sys
from pathlib import Path
from distdl.health import incident
from distdl.runs import failures
from distdl.runs.directory import Attempt
attempt = Attempt(Path("outputs/e/r/attempts/001").resolve())
failures.reserve(attempt.errors, 1)
try:
    with open("fill", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
except OSError as error:
    attempt.record_error(1, "OSError", str(error), "x" * 10_000)
print(incident.head(incident.write(attempt)))
"""


def test_a_full_disk_has_room_for_the_report(attempt, tmp_path: Path) -> None:
    """A real one, in a namespace of its own."""
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}/disk && cp -r outputs disk && cd disk"
    (tmp_path / "disk").mkdir()
    script = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*script, mount], capture_output=True).returncode
    ):
        pytest.skip("no mount in a namespace here")
    code = shlex.join([sys.executable, "-c", FILLED])
    done = subprocess.run(
        [*script, f"{mount} && {code} && ls -A outputs/e/r/attempts/001"], **PIPED
    )
    assert done.stdout.startswith("rank 1 failed first: OSError: [Errno 28] No space left"), done
    assert "cause   disk is full" in done.stdout and ".reserve" not in done.stdout
    assert "incident.json\nincident.md\n" in done.stdout


def test_a_restart_keeps_the_report_of_the_start_before(attempt) -> None:
    attempt.begin()
    failed(attempt, 1, "ValueError")
    seen(attempt, 1)
    reported(attempt)
    attempt.begin()
    names = {path.name for path in attempt.path.iterdir()}
    assert {"errors-001", "health-001", "incident-001.json", "incident-001.md"} <= names
    assert not {"errors", "health", "incident.json", "incident.md"} & names


@pytest.mark.parametrize("gone", [True, False])
def test_a_host_of_which_nothing_is_left_is_named(attempt: Attempt, gone: bool) -> None:
    """All processes of the run have ended at once; nobody could write why."""
    row = {"host": "node7", "process": "7:boot/1", "agent": "6:boot/1"}
    attempt.record_ranks([{**row, "rank": rank} for rank in (0, 1)])
    attempt.begin()
    if gone:
        attempt.update(birth="boot/1")  # of a process that is gone
    report = incident.read(attempt)
    assert (report is None) != gone
    if report:
        assert (report.cause, report.host, len(report.ranks)) == ("lost host", "node7", 2)
