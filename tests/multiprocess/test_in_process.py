"""One device needs no second process: breakpoint() stops in the user's own code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, environment

MINE = """
from distdl.models import ImageClassifier
class Mine(ImageClassifier):
    def training_step(self, batch, batch_idx):
        marker = 40 + 2
        breakpoint()
        return super().training_step(batch, batch_idx)
"""
# The command line, with a count of what is to be done once.
COUNTED = """
import json, sys
from distdl.cli import main as command_line
from distdl.runs import attempt, provenance, files as run_files
from distdl.launchers.local import LocalLauncher

calls = {"request": 0, "launch.yaml": 0, "status.json": []}
request, load_yaml, write_json = LocalLauncher.request, run_files.load_yaml, attempt.write_json

def counted_request(*arguments):
    calls["request"] += 1
    return request(*arguments)

def counted_read(path, *arguments):
    calls["launch.yaml"] += path.name == "launch.yaml"
    return load_yaml(path, *arguments)

def counted_write(path, value):
    calls["status.json"].append(value["state"])
    return write_json(path, value)

LocalLauncher.request, run_files.load_yaml = counted_request, counted_read
attempt.write_json = counted_write
sys.argv[0] = command_line.__file__
code = command_line.main()
calls["packages"] = provenance.packages.cache_info().misses
open("calls.json", "w").write(json.dumps(calls))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a training of one step printed, and its folder."""
    folder = tmp_path_factory.mktemp("in_process")
    (folder / "mine.py").write_text(MINE)
    typed = (*TINY, "model._target_=mine.Mine", "debug=step", "trainer.max_epochs=1")
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, *typed],
        cwd=folder,
        env=environment(),
        input="p 'marker', marker\nc\n",
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder


def test_pdb_works(trained: tuple[str, Path]) -> None:
    assert "('marker', 42)" in trained[0]


def test_one_journey(trained: tuple[str, Path]) -> None:
    calls: dict[str, Any] = json.loads((trained[1] / "calls.json").read_text())
    assert (calls["request"], calls["launch.yaml"], calls["packages"]) == (1, 1, 1)
    # The start, the loaders, the step, the epoch; the end, and that nothing more comes of it.
    assert calls["status.json"] == [*["RUNNING"] * 4, *["SUCCEEDED"] * 2]
