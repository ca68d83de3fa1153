"""The command's own children end with it, also where it was killed and could not signal them."""

import os
import subprocess
import sys

import pytest

from distdl.util.orphans import PARENT
from distdl.util.processes import start_time
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
SLOW = """
import os, time
from pathlib import Path
Path(__file__).with_name("pid").write_text(str(os.getpid()))
time.sleep(600)
"""


def test_the_child_that_validates_ends_with_a_killed_command(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    keys = (
        "model._target_=slow.Model",
        "data=synthetic",
        "trainer.accelerator=cpu",
        "dry_run=true",
    )
    typed = [sys.executable, "-m", "distdl", *keys]
    command = subprocess.Popen(typed, start_new_session=True, cwd=tmp_path)
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text())
    command.kill()
    command.wait()
    until(lambda: start_time(int(pid.read_text())) == "")


def test_a_child_whose_parent_is_gone_ends_at_once():
    call = "from distdl.util.orphans import die_with_parent; die_with_parent()"
    for parent, code in ((os.getpid(), 0), (1, 1)):
        env = {**os.environ, PARENT: str(parent)}
        assert subprocess.run([sys.executable, "-c", call], env=env).returncode == code
