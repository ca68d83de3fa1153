"""The process of a program: what it leaves behind, and what its end says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from distdl.incident import causes
from distdl.job import JobState
from distdl.program import ending
from distdl.program.output import Output
from distdl.program.process import NotStarted, Process
from distdl.ranks.stopping import StopRequest
from tests.waiting import until

# As a rank does: starts a shell that starts another process, and waits.
RANK = """
import os, sys
from pathlib import Path
from distdl.program.process import Process
process = Process(["sh", "-c", "setsid sleep 300 & sleep 300"], os.environ, Path("."), 1)
print("started", flush=True)
process._popen.wait()
"""


def ran(tmp_path, *words, stop=None, grace=5.0):
    output = Output(tmp_path / "log")
    process = Process(words, os.environ, tmp_path, output.writing)
    output.started()
    end = process.wait(StopRequest() if stop is None else stop, grace)
    output.close()
    return end.code, [*output.tail()], process


def asked(name="SIGTERM"):
    stop = StopRequest()
    stop.state = JobState.PREEMPTED
    stop.signal = name
    return stop


def test_nothing_is_left(tmp_path):
    seconds = f"300.{os.getpid()}"  # which no other process of this machine sleeps
    script = f"setsid sleep {seconds} & sleep {seconds} & exit 4"
    code, _, process = ran(tmp_path, "sh", "-c", script)
    assert code == 4
    assert not process.lives()
    # What became a child of process 1 would be left.
    commands = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert ["sleep", seconds] not in commands


def test_a_shell_and_its_command_are_asked(tmp_path):
    """A shell hands on no signal, and the program that it waits for saves."""
    saves = "trap 'echo saved; exit 75' TERM\ntouch ready\nwhile :; do sleep 0.1; done\n"
    (tmp_path / "inner.sh").write_text(saves)
    (tmp_path / "outer.sh").write_text("bash inner.sh\nexit $?\n")
    stop = StopRequest()

    def ask():
        until(lambda: (tmp_path / "ready").exists(), 20)
        stop.signal = "SIGTERM"
        stop.state = JobState.PREEMPTED

    threading.Thread(target=ask).start()
    code, lines, _ = ran(tmp_path, "bash", "outer.sh", stop=stop, grace=10.0)
    assert code in (75, -signal.SIGTERM)  # bash itself ends at once, or with its command's code
    assert "saved" in lines


def test_who_does_not_listen_is_killed(tmp_path):
    begin = time.monotonic()
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code, _, _ = ran(tmp_path, sys.executable, "-c", deaf, stop=asked(), grace=0.5)
    assert code < 0
    assert time.monotonic() - begin < 30


def test_a_killed_rank_leaves_nothing(tmp_path):
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, cwd=tmp_path)
    assert rank.stdout is not None
    rank.stdout.readline()

    def started():
        children = psutil.Process(rank.pid).children(recursive=True)
        return children if [p.name() for p in children].count("sleep") == 2 else None

    below = until(started, 20)
    rank.kill()
    rank.wait()
    until(lambda: not any(p.is_running() and p.status() != "zombie" for p in below), 20)


def test_what_the_system_refuses(tmp_path):
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    for name, why in (("./none", "does not exist"), ("./text", "no program"), ("none", "exist")):
        with pytest.raises(NotStarted, match=why):
            ran(tmp_path, name)


def test_secrets_do_not_reach_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-s3cr3t-s3cr3t")
    _, lines, _ = ran(tmp_path, "sh", "-c", 'echo "key $MY_API_KEY"')
    assert lines == ["key ***MY_API_KEY***"]
    assert "s3cr3t" not in (tmp_path / "log").read_text()


def test_the_exception_of_a_program():
    lines = [
        "step 3",
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "x.py", line 1, in <module>',
        "[rank1]:     f()",
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory",
        "bye",
    ]
    assert ending.exception_of(lines)[:2] == ("OutOfMemoryError", "CUDA out of memory")
    assert ending.exception_of(["step 3", "Segmentation fault"]) == ("", "", "")


def test_what_a_shell_runs_is_stopped_and_continued(tmp_path):
    """A program that is stopped would never see that it is asked to end."""
    saves = "trap 'echo saved; exit 75' TERM\n: > trapped\nwhile :; do sleep 0.1; done\n"
    (tmp_path / "inner.sh").write_text(saves)
    output = Output(tmp_path / "log")
    words = ["sh", "-c", "bash inner.sh; exit $?"]
    process = Process(words, os.environ, tmp_path, output.writing)
    output.started()
    child = psutil.Process(until(lambda: psutil.Process(process.pid).children(), 20)[0].pid)
    until((tmp_path / "trapped").is_file, 20)
    assert child.name() == "bash"
    assert not process.stopped()
    child.suspend()
    assert until(process.stopped, 20)
    process.wait(asked(), 20.0)
    output.close()
    assert "saved" in output.tail()


def test_the_line_that_tells_most_is_named():
    full = "cp: error writing 'x': No space left on device"
    assert causes.telling(["step 3", full, "the copy failed", "giving up"]) == full
    assert causes.telling(["step 3", "no nan here", "giving up"]) == "giving up"
    assert causes.telling([]) == ""


def test_a_program_that_has_ended_was_not_asked(tmp_path):
    """Another rank failed of its end, and its own was asked then: the program is the cause."""
    process = Process(["sh", "-c", "kill -9 $$"], os.environ, tmp_path, 1)
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, 20)
    assert process.wait(asked(), 5.0) == (-signal.SIGKILL, "", False)
    other = Process(["sleep", "60"], os.environ, tmp_path, 1)
    assert other.wait(asked(), 5.0) == (-signal.SIGTERM, "", True)


TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>']
OWN = [
    (-signal.SIGKILL, [], True),
    (-signal.SIGTERM, [], False),  # Slurm sends it to every process
    (1, ["something went wrong"], False),
    (1, [*TRACEBACK, "ValueError: bad weather"], True),
    (1, [*TRACEBACK, "KeyboardInterrupt"], False),
    (1, [*TRACEBACK, "RuntimeError: DataLoader worker is killed by signal: Terminated."], False),
    (75, [], False),
]


@pytest.mark.parametrize("code, lines, own", OWN)
def test_whose_end_it_was(code, lines, own):
    assert ending.is_own(code, lines) is own
