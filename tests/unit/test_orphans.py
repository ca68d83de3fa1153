"""The command's own children end with it, also where it was killed and could tell them nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distdl.util.orphans import PARENT
from distdl.util.processes import start_time

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")

# Stands for the command line: asks the child that validates, whose import takes its time.
COMMAND = """
import json, sys
from distdl.validation.validate import _ask_child
print(_ask_child(sys.argv[1]))
"""
SLOW = """
import os, time
from pathlib import Path
Path(__file__).with_name("pid").write_text(str(os.getpid()))
time.sleep(600)
"""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def test_the_child_that_validates_ends_with_a_killed_command(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    context = {"num_nodes": 1, "devices": 1, "world_size": 1, "accelerator": "cpu", "local": True}
    request = {
        "config": {"model": {"_target_": "slow.Model"}},
        "root": str(tmp_path),
        "context": context,
        **{name: [] for name in ("expressions", "skip", "broken")},
        "trust": [[str(tmp_path)], []],
        "supplied": {},
    }
    typed = [sys.executable, "-c", COMMAND, json.dumps(request)]
    command = subprocess.Popen(typed, start_new_session=True, cwd=tmp_path)
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text())
    command.kill()
    command.wait()
    until(lambda: start_time(int(pid.read_text())) == "")


def test_a_child_that_comes_too_late_ends_at_once() -> None:
    """Its parent was killed while it was starting: no signal will come."""
    call = "from distdl.util.orphans import die_with_parent; die_with_parent(); print('lives')"
    for parent, code in ((os.getpid(), 0), (1, 1)):
        done = subprocess.run(
            [sys.executable, "-c", call], env={**os.environ, PARENT: str(parent)}, check=False
        )
        assert done.returncode == code
