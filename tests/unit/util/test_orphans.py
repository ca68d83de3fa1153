"""A process ends with its parent."""

import os
import subprocess
import sys

from distdl.util.orphans import PARENT
from distdl.util.processes import start_time
from tests.waiting import until

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
