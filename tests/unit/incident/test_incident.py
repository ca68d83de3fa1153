"""The report of a failed attempt, from the files that its ranks have left: which rank, and why."""

import errno
import json
import os
import re
import time

import pytest

from distdl.incident import incident
from distdl.job import JobState
from distdl.launch import start
from distdl.runs import files
from distdl.runs.directory import Attempt, RunDirectory

NET = "net.py, line 12, in forward"
GLOO = "[/pytorch/third_party/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
NBYTES = "[enforce fail at pair.cc:453] op.preamble.length <= op.nbytes. 4096 vs 4"
CANARY = "canary-0d9f61e2"
REDUCE = {"op": "all_reduce", "sizes": [[32, 32]], "where": "net.py, line 3, in f"}
SMALL = {**REDUCE, "sizes": [[4]]}
GRADIENT = {"op": "all_reduce", "sizes": [[9]], "where": ""}
# What a rank records of its failure, and how its monitor or its watchdog saw it.
LOST = {"kind": "RuntimeError", "message": GLOO, "lost_peer": True}
HUNG = {"kind": "Hang", "message": "no progress for 60 s", "exit_code": 70, "enqueued": 40}
BUG = {"kind": "ValueError", "message": "bad weather"}
SEEN = {
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
    "enqueued": 40,
    "last": REDUCE,
    "memory": {"rss": 2**30, "oom_kills": 0},
    "disk": {"run": 2**30},
    "collective": None,
}


def leaves(error=None, **sight):
    """A rank that leaves these two, each if there is anything in it."""

    def leave(attempt, rank):
        place = {"rank": rank, "host": f"node{rank}"}
        if error:
            fields = {"trace": "", "host": place["host"], **error}
            first = (fields.pop(name) for name in ("kind", "message", "trace"))
            attempt.record_error(rank, *first, **fields)
        if sight:
            files.write_json(attempt.path / f"health/rank_{rank}.json", {**SEEN, **place, **sight})

    return leave


def waits(**sight):
    """A rank that waits in a collective of the backward of step 7, batch 3 of epoch 1."""
    inside = {"phase": "backward", "collective": REDUCE, "enqueued": 41, **sight}
    return leaves({**HUNG, "waiting": True, "enqueued": inside["enqueued"]}, **inside)


def heard(*fresh, silent=1, phase="forward"):
    """Of whom a rank hears, and of whom not any more."""
    last = {"rank": silent, "host": f"node{silent}", "step": 7, "where": NET, "fresh": False}
    peers = {str(rank): {"rank": rank, "fresh": True} for rank in fresh}
    return {**peers, str(silent): {**last, "phase": phase, "age": 1.0}}


def reported(attempt, *ranks):
    for number, leave in enumerate(ranks):
        leave(attempt, number)
    report = incident.write(attempt)
    assert report is not None
    return report


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """A failed attempt of two ranks, without any file of theirs."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create("seed: 1\n", {"command": ["python", "-m", "distdl", "seed=1", "name=a b"]})
    size = {"num_nodes": 1, "devices": 2, "accelerator": "cpu", "device_ids": None}
    attempt = run.begin_attempt({"run_id": "e/r", "where": {}, "resources": size})
    attempt.end(JobState.FAILED)
    return attempt


RUNTIME = "RuntimeError"
MESSAGES = [
    ("/dev/shm is full", RUNTIME, "DataLoader worker (pid 7) is killed by signal: Bus error. It"),
    ("disk is full", "OSError", "[Errno 28] No space left on device: 'a.ckpt'"),
    ("too many open files", "OSError", "[Errno 24] Too many open files: 'a.jpg'"),
    (
        "unused parameters",
        RUNTIME,
        "It looks like your LightningModule has parameters that were not used in producing the "
        "loss returned by training_step. If this is intentional, you must enable the detection",
    ),
    ("parameters used twice", RUNTIME, "Expected to mark a variable ready only once. This error"),
    ("too many open files", "RuntimeError", "received 0 items of ancdata"),
    (
        "too many open files",
        "RuntimeError",
        "unable to open shared memory object </torch_1_2_3> in read-write mode: "
        "Too many open files (24)",
    ),
    ("disk is full", RUNTIME, "[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0"),
    ("out of memory (GPU)", "OutOfMemoryError", "CUDA out of memory. Tried to allocate"),
    ("out of memory (host)", "MemoryError", "Unable to allocate 9 GiB"),
    ("data worker killed", RUNTIME, "DataLoader worker (pid 4711) is killed by signal: Killed. "),
    ("not a number", RUNTIME, "Function 'MulBackward0' returned nan values in its 0th output."),
    ("CUDA error", "AcceleratorError", "CUDA error: an illegal memory access"),
    ("NCCL transport", "DistBackendError", "NCCL error: unhandled system error"),
    ("port in use", "OSError", "[Errno 98] port 29500 of node1 cannot be used: Address already in"),
    (
        "port in use",
        "DistNetworkError",
        "The server socket has failed to listen on any local network address. port: 29500, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    ),
    ("port in use", "NotMet", "port 29500 of node1 cannot be used: Address already in use"),
    ("not started", "NotStarted", "/opt/x cannot be started: it does not exist"),
    ("no PMI", "Ended", "the program ended with exit code 1: OMPI was not built with PMI support"),
    ("ranks missing", "NotMet", "1 of 2 ranks have not come to node0:29500: 1"),
    ("checkpoints not kept", "NotKept", "the checkpoints are not in s3://b/x: no such bucket"),
    ("refused by the host", "NotRun", "[Errno 13] Permission denied: '/data/x'"),
    ("disk is full", "NotRun", "[Errno 28] No space left on device: '/data/x'"),
    ("exit", "Ended", "ended with exit code 3 on node1, without an error message"),
    ("killed", "Killed", "killed by SIGSEGV on node1"),
    ("exception", "KeyError", "'banana'"),  # has nan in it
]


@pytest.mark.parametrize("cause, kind, message", MESSAGES)
def test_the_cause_of_an_exception(attempt, cause, kind, message):
    """The other rank lost its peer, and its clock is ahead."""
    error = {"kind": kind, "message": message, "where": NET}
    report = reported(attempt, leaves({**LOST, "time": 1.0}), leaves(error))
    assert (report.rank, report.cause, report.host, report.where) == (1, cause, "node1", NET)
    assert report.title.startswith("rank 1 failed first: ")
    assert report.title.endswith("(node1)")
    assert report.waiting == "rank 0 waits for it"
    assert " ".join(message.split()) in report.evidence


def hung(**sight):
    return leaves(HUNG, **sight)


def aborted(error=None, **sight):
    """A rank that gloo has aborted in a collective: the number of it is not known."""
    return leaves(error, how="aborted", collective={"op": "a collective"}, **sight)


def killed(signal, **memory):
    """A rank that its monitor, and by a signal its agent, has seen ending; its memory before."""
    error = {"kind": "Killed", "message": f"killed by {signal} on node1", "signal": signal}
    seen = {"how": "died", "process": "", "memory": memory, "collective": REDUCE}
    return leaves(error if signal else None, **seen)


ABORT = {"kind": "Killed", "message": "killed by SIGABRT on node0", "signal": "SIGABRT"}
LOSES = leaves(LOST, how="failed", phase="backward", collective={**REDUCE, "seq": 113})
BUSY_WORKER = {"workers": [{"pid": 9}, {"pid": 8, "where": NET}], "where": "", "phase": "data"}
AT_THE_END = {"phase": "callbacks", "action": "fit_loop.on_advance_end", "batch": 2}
# What rank 1 waits in, while rank 0 waits in the backward of step 7, batch 3.
ELSEWHERE = [
    ("mismatched collective", waits(collective=SMALL)),
    ("mismatched collective", waits(collective={**REDUCE, "op": "broadcast"})),
    ("skipped collective", waits(phase="optimizer", collective=GRADIENT)),
    ("skipped collective", waits(step=8, phase="forward")),
    ("skipped collective", waits(phase="validation", collective=GRADIENT)),
    ("uneven batches", waits(phase="validation", collective=GRADIENT, batch=2)),
    ("uneven batches", waits(**AT_THE_END, collective=GRADIENT)),
    ("uneven batches", waits(epoch=2, batch=1, phase="forward")),
    ("uneven batches", waits(phase="end", epoch=None)),
]
# gloo hangs then, or raises on the rank that gets more than it asked for: here the innocent one.
RAISES = leaves({"kind": RUNTIME, "message": NBYTES}, how="failed", phase="backward")
CHAIN = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in save\n'
    "OSError: [Errno 28] No space left on device\n\nTraceback (most recent call last):\n"
    "RuntimeError: the checkpoint was not written\n"
)
EARLY, LATE, LATER = (
    {**error, "time": time, "enqueued": enqueued}
    for error, time, enqueued in ((HUNG, 1.0, 3), (BUG, 3.0, 57), (BUG, 2.0, 58))
)
# It hears nobody, and the other two hear each other.
CUT_OFF = {"world_size": 3, "peers": {**heard(silent=0), **heard(silent=1)}}
OTHERS = [{"world_size": 3, "peers": heard(other, silent=2)} for other in (1, 0)]
THREE = (REDUCE, SMALL, REDUCE)
# A sender that is one broadcast further on has made no mistake.
SENDER = waits(phase="checkpoint", collective={**REDUCE, "op": "broadcast", "seq": 114})
RECEIVER = waits(phase="checkpoint", collective={**SMALL, "op": "broadcast", "seq": 113})
# A program that a signal has stopped; the other ranks' own programs fail because of it, and say so
# in words that distdl does not know.
ASLEEP = {"how": "program", "process": "stopped", "phase": "the program was stopped by a signal"}
UNKNOWN_WORDS = leaves({"kind": "Ended", "message": "UNAVAILABLE: task 1 sent no heartbeat"})
# The rank and the cause that are named, and what each rank left.
JOBS = [
    (1, "stopped", [UNKNOWN_WORDS, leaves(**ASLEEP)]),
    (1, "stopped", [UNKNOWN_WORDS, leaves({**HUNG, "program": True}, **ASLEEP)]),
    (1, "disk is full", [leaves(LOST), leaves({"kind": "Killed", "message": "killed by SIGXFSZ"})]),
    (1, "stopped", [waits(), hung(process="stopped", collective=REDUCE)]),
    (1, "data worker blocked", [waits(), hung(**BUSY_WORKER)]),
    (1, "lock", [waits(), hung(wchan="futex_wait_queue")]),
    (1, "lock", [waits(), hung(wchan="futex_wait", phase="validation", batch=2)]),
    (1, "endless loop", [waits(), hung(process="running", wchan="")]),
    (1, "endless loop", [waits(), hung(process="running", wchan="", enqueued=None)]),  # in C
    (1, "blocked", [waits(), hung(process="", wchan="")]),  # the kernel says nothing
    (1, "slow rank", [waits(), hung(age=4.0, process="running")]),
    (1, "skipped collective", [aborted(ABORT, phase="forward"), LOSES]),
    (1, "skipped collective", [aborted(phase="forward"), LOSES]),
    (1, "mismatched collective", [aborted(ABORT, phase="backward"), LOSES]),
    (0, "uneven batches", [aborted(ABORT, **AT_THE_END), LOSES]),
    *((1, cause, [waits(), other]) for cause, other in ELSEWHERE),
    *((1, cause, [RAISES, other]) for cause, other in ELSEWHERE),
    (1, "out of memory (killed)", [leaves(LOST), killed("SIGKILL", oom_kills=1)]),
    (1, "out of memory (killed)", [leaves(LOST), killed("SIGKILL", oom_kills=0, available=2**20)]),
    (1, "killed", [leaves(LOST), killed("SIGKILL", used=2**30, limit=2**30)]),  # by the page cache
    (1, "killed", [leaves(LOST), killed("SIGSEGV", oom_kills=1)]),
    (1, "out of memory (killed)", [leaves(LOST), killed(None, oom_kills=1)]),
    (1, "killed", [leaves(LOST), killed(None)]),
    (1, "mismatched collective", [waits(world_size=3, collective=c) for c in THREE]),
    (0, "skipped collective", [waits(phase="optimizer", collective=GRADIENT), waits()]),
    (1, "skipped collective", [waits(phase="end", peers=heard(phase="end"))]),
    (0, "connection", [leaves(LOST), leaves(LOST)]),
    (0, "connection", [SENDER, RECEIVER]),
    (0, "connection", [waits(peers=heard(other, silent=7)) for other in (1, 0)]),
    (2, "lost host", [waits(**each) for each in (*OTHERS, CUT_OFF)]),
    (0, "disk is full", [leaves({**BUG, "trace": CHAIN})]),  # that led to it
    # Fewer collectives count more than clocks, and a message more than both.
    (1, "exception", [leaves(each) for each in (EARLY, LATE, LATER)]),
]


@pytest.mark.parametrize("rank, cause, ranks", JOBS)
def test_which_rank_and_why(attempt, rank, cause, ranks):
    report = reported(attempt, *ranks)
    assert (report.rank, report.cause) == (rank, cause)


def test_a_lost_host_of_a_thousand(attempt):
    """It left nothing; the others heard of it. The time is linear in their number."""
    ranks = [waits(world_size=1001, peers=heard(silent=1000))] * 1000
    begin = time.process_time()
    report = reported(attempt, *ranks)
    assert time.process_time() - begin < 20
    assert (report.rank, report.cause, report.host) == (1000, "lost host", "node1000")
    assert report.title == f"rank 1000 did not come: step 7, forward, {NET}   (node1000)"
    assert report.waiting.startswith("ranks 0, 1, 2, 3 and 996 more wait for it in all_reduce")
    assert report.ranks[1000]["state"] == "left nothing"


@pytest.mark.parametrize("gone", [True, False])
def test_a_host_of_which_nothing_is_left_is_named(attempt, gone):
    """All processes of the run have ended at once; nobody could write why."""
    row = {"host": "node7", "process": "7:boot/1", "agent": "6:boot/1"}
    attempt.record_ranks([{**row, "rank": rank} for rank in (0, 1)])
    attempt.begin()
    if gone:
        attempt.update(birth="boot/1")  # of a process that is gone
    report = incident.read(attempt)
    assert (report is None) != gone
    assert not report or (report.cause, report.host, len(report.ranks)) == ("lost host", "node7", 2)


QUIET = [
    (JobState.CANCELLED, None),
    (JobState.PREEMPTED, None),
    (JobState.FAILED, None),
    (JobState.FAILED, ("UserError", 2)),
    (JobState.FAILED, ("BdbQuit", 1)),
    (JobState.SUCCEEDED, ("ValueError", 1)),
]


@pytest.mark.parametrize("state, error", QUIET)
def test_no_rank_failed(attempt, state, error, capsys):
    if error:
        leaves({"kind": error[0], "message": "", "exit_code": error[1]})(attempt, 0)
    attempt.end(state, concluded=True)
    start.report_failure(attempt)
    assert not capsys.readouterr().err
    assert not list(attempt.path.glob("incident.*"))


@pytest.mark.parametrize("rank, folder", [(1, "agent"), (3, "agent-1")])
def test_the_screen_and_the_log(attempt, rank, folder, capsys):
    """The last lines are those of the rank's log, and of what it printed, which its node's agent
    writes: two ranks per node. A resume is proposed only where there is a checkpoint."""
    for local in (0, 1):
        path = attempt.logs / f"{folder}/x/attempt_0/{local}"
        path.mkdir(parents=True)
        (path / "stderr.log").write_text(f"printed by {local}\n")
    (attempt.logs / f"rank_{rank}.log").write_text("".join(f"{n}\n" for n in range(100_000)))
    ranks = [waits()] * rank + [leaves(process="running", samples=[*range(9)])]
    report = reported(attempt, *ranks)
    assert report.log_tail == [*map(str, range(100_000 - 12, 100_000)), "printed by 1"]
    assert report.next == "python -m distdl seed=1 'name=a b'"
    start.report_failure(attempt)
    title, *lines = capsys.readouterr().err.splitlines()
    assert title == f"rank {rank} did not come: step 7, forward, {NET}   (node{rank})"
    others = "rank 0 waits" if rank == 1 else "ranks 0, 1, 2 wait"
    call = "all_reduce of 1024 values (net.py, line 3, in f)"
    assert lines[1] == f"  others  {others} for it in {call}"
    assert lines[0].startswith("  cause   endless loop: ")
    assert len(lines) == 6
    assert lines[2] == "  samples 0, 1, 2, 3, 4, 5, 6, 7, ... (9 in this rank's batch)"
    assert lines[4] == f"  log     outputs/e/r/attempts/001/logs/rank_{rank}.log"
    assert lines[5] == "  report  outputs/e/r/attempts/001/incident.md"
    run = RunDirectory(attempt.path.parents[1])
    (run.checkpoints / "epoch_000.ckpt.manifest.json").mkdir(parents=True)
    assert reported(attempt).next == "python -m distdl resume outputs/e/r"


NESTED = b'{"rank": 1, "peers": ' + b'{"1": {"peers": ' * 500 + b"{}" + b"}}" * 500 + b"}"
HOSTILE = {
    "deep": b"[" * 100_000,
    "deep inside": NESTED,
    "long numbers": b'{"rank": 1, "peers": {"' + b"9" * 5000 + b'": {}, "-1": {}, "\xc2\xb2": {}}}',
    "too large": b'{"rank": 1, "phase": "' + b"x" * (1 << 20) + b'"}',
    "numbers": b'{"rank": 1, "step": 1e999, "world_size": 1000000000000, "age": NaN, "epoch": -1}',
    "another rank's": b'{"rank": 5, "world_size": 64}',
    "types": b'{"rank": 1, "host": [1], "memory": {"rss": "x"}, "peers": {"x": 1}, "where": {}}',
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_can_be_read_of_damaged_files_counts(attempt, case):
    ranks = waits(peers=heard()), leaves({**HUNG, "where": NET})
    for folder, rank in ((attempt.path / "health", 1), (attempt.errors, 2)):
        folder.mkdir(exist_ok=True)
        (folder / f"rank_{rank}.json").write_bytes(HOSTILE[case])
    report = reported(attempt, *ranks)
    assert (report.rank, report.where, len(report.ranks)) == (1, NET, 2)
    assert report.phase in ("", "forward")  # the one that the other rank has heard
    assert json.loads((attempt.path / "incident.json").read_text())["rank"] == 1


def test_text_of_a_file_is_only_text(attempt):
    text = "a\x1b[2J\r\n```\n# <b>|![x](http://e)\u202e````"
    fields = ("host", "where", "action", "phase", "process", "how")
    attempt.logs.mkdir()
    (attempt.logs / "rank_1.log").write_text(f"log\n`````\n{text}\n")
    report = reported(attempt, waits(), leaves(HUNG, **dict.fromkeys(fields, text)))
    page = (attempt.path / "incident.md").read_text()
    assert report.rank == 1
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", page)
    assert len(incident.head(report).splitlines()) <= 8
    for line in page.splitlines():
        assert not line or line.startswith("    ") or re.fullmatch(r"## [\w :()]+", line), line


def test_links_are_not_followed(attempt, tmp_path):
    (tmp_path / "secret").write_text(CANARY)
    (tmp_path / "sight").write_text(json.dumps({"rank": 1, "where": CANARY}))
    for name, target in {"logs/rank_1.log": "secret", "health/rank_1.json": "sight"}.items():
        (attempt.path / name).parent.mkdir(exist_ok=True)
        (attempt.path / name).symlink_to(tmp_path / target)
    os.mkfifo(attempt.path / "health/rank_0.json")
    (attempt.path / "incident.md").symlink_to(tmp_path / "secret")
    reported(attempt, leaves(), leaves(BUG))
    assert (tmp_path / "secret").read_text() == CANARY
    assert not [path for path in attempt.path.glob("incident.*") if CANARY in path.read_text()]


def test_a_copied_run_names_its_own_paths(attempt, tmp_path):
    run = attempt.path.parents[1]
    leaves({"kind": "OSError", "message": f"cannot read {run}/checkpoints/a.ckpt"})(attempt, 1)
    run.rename(tmp_path / "copy")
    report = reported(Attempt(tmp_path / "copy/attempts/001"))
    assert f"cannot read {tmp_path}/copy/checkpoints/a.ckpt" in report.evidence
    assert report.report == "copy/attempts/001/incident.md"


def test_a_full_disk_hides_no_failure(attempt, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    leaves(BUG)(attempt, 1)
    monkeypatch.setattr(files, "write_bytes", full)
    start.report_failure(attempt)
    shown = capsys.readouterr().err
    assert "rank 1 failed first: ValueError: bad weather" in shown
    assert "report" not in shown


def test_a_restart_keeps_the_report_of_the_start_before(attempt):
    attempt.begin()
    reported(attempt, leaves(), leaves(BUG, how="failed"))
    attempt.begin()
    names = {path.name for path in attempt.path.iterdir()}
    assert {"errors-001", "health-001", "incident-001.json", "incident-001.md"} <= names
    assert not {"errors", "health", "incident.json", "incident.md"} & names


def test_no_file_about_a_failure_holds_a_secret_of_an_exception(attempt):
    """Whoever records it: the text of an exception is whatever a library puts into it."""
    secret = "Kro" + "plo47x"
    message = f"mysql -h db -u me -p{secret} failed: login://me:{secret}@db.corp.net refused"
    trace = f"File net.py, line 1\nValueError: wrong password '{secret}', password={secret}"
    attempt.record_error(0, "ValueError", message, trace, rank_says=1)
    attempt.fail(f"rank 0: {message}", 1)
    assert incident.write(attempt) is not None
    files_of = [path for path in attempt.path.rglob("*") if path.is_file()]
    names = {path.name for path in files_of}
    assert {"rank_0.json", "status.json", "incident.json", "incident.md"} <= names
    assert [path.name for path in files_of if secret in path.read_text()] == []


# Ranks whose exceptions alone name another one than the whole picture does.
ALONE = waits(action="module.log", phase="forward", collective={"op": "barrier"})
STOPPED_WORKER = {"workers": [{"pid": 8, "process": "stopped"}], "phase": "data", "where": ""}
VERDICTS = [
    (1, "skipped collective", [waits(), ALONE]),  # self.log(sync_dist=True) behind `if rank == 1`
    (0, "skipped collective", [ALONE, waits()]),
    (1, "stopped", [waits(), hung(**STOPPED_WORKER)]),
    (1, "mismatched collective", [aborted(ABORT, phase="backward"), LOSES]),
    (1, "killed", [leaves(LOST), killed(None)]),
    (2, "lost host", [waits(**each) for each in (*OTHERS, CUT_OFF)]),
    (1, "exception", [leaves(LOST), leaves(BUG)]),
    (1, "stopped", [UNKNOWN_WORDS, leaves(**ASLEEP)]),
]


@pytest.mark.parametrize("rank, cause, ranks", VERDICTS)
def test_the_report_and_the_status_name_one_rank(attempt, rank, cause, ranks):
    for number, leave in enumerate(ranks):
        leave(attempt, number)
    attempt.conclude(JobState.FAILED, 1)
    report = incident.write(attempt)
    status = attempt.status()
    assert (report.rank, report.cause) == (rank, cause)
    assert status["first_error"]["rank"] == rank
    assert status["error"].startswith(f"rank {rank}: ")
    assert report.title.startswith(f"rank {rank} was killed") == (cause == "killed")


def test_what_ended_the_job_from_outside_stays_in_the_status(attempt):
    leaves(LOST)(attempt, 0)
    attempt.conclude(JobState.FAILED, 1, killed="mpirun was killed by SIGKILL")
    incident.write(attempt)
    assert attempt.status()["error"] == "mpirun was killed by SIGKILL"


@pytest.mark.parametrize("recipe, resumes", [("program: {command: [x]}", True), ("", False)])
def test_a_program_that_has_saved_anything_is_resumed(tmp_path, monkeypatch, recipe, resumes):
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create(f"seed: 1\n{recipe}\n", {"command": ["python", "-m", "distdl", "run", "--", "x"]})
    attempt = run.begin_attempt({"run_id": "e/r", "where": {}})
    run.checkpoints.mkdir(exist_ok=True)
    (run.checkpoints / "0").write_text("1")
    attempt.end(JobState.FAILED)
    report = reported(attempt, killed("SIGKILL"))
    assert (report.next == "python -m distdl resume outputs/e/r") is resumes
