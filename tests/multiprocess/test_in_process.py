"""One device needs no second process: breakpoint() stops in the user's own code."""

from __future__ import annotations

import json
import subprocess
import sys

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
calls = {"request": [], "launch.yaml": [], "status.json": []}
def counted(owner, name, key, note):
    real = getattr(owner, name)
    def call(*arguments):
        calls[key] += note(*arguments)
        return real(*arguments)
    setattr(owner, name, call)
counted(LocalLauncher, "request", "request", lambda *_: [1])
counted(run_files, "load_yaml", "launch.yaml", lambda path, *_: [1] * (path.name == "launch.yaml"))
states = lambda path, value: [value.get("state")] * (path.name == "status.json")
counted(attempt, "write_json", "status.json", states)
sys.argv[0] = command_line.__file__
code = command_line.main()
calls["packages"] = provenance.packages.cache_info().misses
open("calls.json", "w").write(json.dumps(calls))
sys.exit(code)
"""


def test_a_debugger_works_and_every_file_is_read_once(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    typed = (*TINY, "model._target_=mine.Mine", "debug=step", "trainer.max_epochs=1")
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, *typed],
        cwd=tmp_path,
        env=environment(),
        input="p 'marker', marker\nc\n",
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "('marker', 42)" in done.stdout
    calls = json.loads((tmp_path / "calls.json").read_text())
    assert (calls["request"], calls["launch.yaml"], calls["packages"]) == ([1], [1], 1)
    # The start, the loaders, the step, the epoch; the end, and that nothing more comes of it.
    assert calls["status.json"] == [*["RUNNING"] * 4, *["SUCCEEDED"] * 2]
