"""What the kernel says about memory, and that it ends a process with its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distdl.health import machine
from distdl.util.orphans import PARENT
from distdl.util.processes import start_time
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


SLOW = """
import os, time
from pathlib import Path
Path(__file__).with_name("pid").write_text(str(os.getpid()))
time.sleep(600)
"""


def test_the_child_that_validates_ends_with_a_killed_command(tmp_path, background):
    (tmp_path / "slow.py").write_text(SLOW)
    typed = ("model._target_=slow.Model", "data=synthetic", "trainer.accelerator=cpu")
    command = background(*typed, "dry_run=true", cwd=tmp_path)
    pid = tmp_path / "pid"
    command.until(lambda: pid.exists() and pid.read_text())
    command.process.kill()
    until(lambda: start_time(int(pid.read_text())) == "", 20)


def test_a_child_whose_parent_is_gone_ends_at_once():
    call = "from distdl.util.orphans import die_with_parent; die_with_parent()"
    env = {**os.environ, PARENT: "1"}
    assert subprocess.run([sys.executable, "-c", call], env=env).returncode == 1
