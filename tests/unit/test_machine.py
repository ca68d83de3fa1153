"""What the kernel says about a process: its state, and the memory of its control group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distdl.health import machine
from tests.limits import MEMORY, little_memory
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
USES = """
import sys
for size in sys.stdin:
    memory = b"x" * (int(size) << 20)
    print(flush=True)
"""


def test_a_control_group_with_its_limit_and_kills() -> None:
    with (
        little_memory() as group,
        subprocess.Popen(["cat"], **PIPES) as watcher,
        subprocess.Popen([sys.executable, "-c", USES], text=True, **PIPES) as process,
    ):
        for each in (watcher, process):
            (group / "cgroup.procs").write_text(str(each.pid))
        process.stdin.write("20\n")
        process.stdin.flush()
        assert process.stdout.readline() == "\n"
        memory = machine.memory(process.pid)
        assert (memory["limit"], memory["oom_kills"]) == (MEMORY, 0)
        assert 20 << 20 <= memory["used"] <= MEMORY and memory["rss"] >= 20 << 20
        assert memory["available"] > 0 and machine.oom_kills(watcher.pid) == 0
        process.stdin.write("100\n")
        process.stdin.close()
        assert process.wait() == -signal.SIGKILL
        assert machine.oom_kills(watcher.pid) == 1
        facts = machine.facts(watcher.pid, Path.cwd())
        assert facts["memory"]["oom_kills"] == 1 and facts["disk"]["run"] > 0
        assert machine.facts(watcher.pid, Path.cwd(), kills=1)["memory"]["oom_kills"] == 0
        watcher.stdin.close()


def test_the_state_of_a_process() -> None:
    def state() -> str:
        return machine.state(process.pid)["process"]

    with subprocess.Popen(["cat"], **PIPES) as process:
        until(lambda: state() == "sleeping", 10, state)
        process.send_signal(signal.SIGSTOP)
        until(lambda: state() == "stopped", 10, state)
        process.kill()
        until(lambda: state() == "zombie", 10, state)
    assert machine.state(process.pid) == {"process": "", "wchan": ""}
    assert "rss" not in machine.memory(process.pid)
    assert machine.state(os.getpid())["process"] == "running"
