"""One device needs no second process: breakpoint() stops in the user's own code."""

from __future__ import annotations

from tests.conftest import TINY, distdl

MINE = """
from distdl.models import ImageClassifier
class Mine(ImageClassifier):
    def training_step(self, batch, batch_idx):
        marker = 40 + 2
        breakpoint()
        return super().training_step(batch, batch_idx)
"""


def test_pdb_works(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    typed = (*TINY, "model._target_=mine.Mine", "debug=step", "trainer.max_epochs=1")
    done = distdl(*typed, cwd=tmp_path, input="p 'marker', marker\nc\n")
    assert "('marker', 42)" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
