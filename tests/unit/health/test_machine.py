"""What the kernel says about memory, and about a group that it limits."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distdl.health import machine
from tests.limits import MEMORY, little_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


USES = """
import sys
for size in sys.stdin:
    memory = b"x" * (int(size) << 20)
    print(flush=True)
"""


def test_a_control_group_with_its_limit_and_kills():
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
        assert 20 << 20 <= memory["used"] <= MEMORY
        assert memory["rss"] >= 20 << 20
        assert memory["available"] > 0
        process.stdin.write("100\n")
        process.stdin.close()
        assert process.wait() == -signal.SIGKILL
        facts = machine.facts(watcher.pid, machine.disk(Path.cwd()))
        assert facts["memory"]["oom_kills"] == 1
        assert facts["disk"]["run"] > 0
        assert (
            machine.facts(watcher.pid, machine.disk(Path.cwd()), kills=1)["memory"]["oom_kills"]
            == 0
        )
        watcher.stdin.close()


def test_a_process_that_was_moved_counts_the_kills_of_its_new_group(monkeypatch):
    kills = {"oom_kills": 1}
    monkeypatch.setattr(machine, "memory", lambda pid: {**kills})
    assert machine.facts(1, {}, kills=4)["memory"]["oom_kills"] == 1
    assert machine.oom_kills(1, before=4) == 1
    kills["oom_kills"] = 6
    assert machine.facts(1, {}, kills=4)["memory"]["oom_kills"] == 2
