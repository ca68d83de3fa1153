"""One device needs no second process: breakpoint() stops in the user's own code."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import TINY, environment


def test_pdb_works(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "from distdl.models import ImageClassifier\n"
        "class Mine(ImageClassifier):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        marker = 40 + 2\n"
        "        breakpoint()\n"
        "        return super().training_step(batch, batch_idx)\n"
    )
    command = [
        sys.executable,
        "-m",
        "distdl",
        *TINY,
        "model._target_=mine.Mine",
        "debug=step",
        "trainer.max_epochs=1",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        input="p 'marker', marker\nc\n",
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "('marker', 42)" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
