"""kill -9 to one rank of two, at any moment: that rank is named, and the run has failed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY, UNCHECKED, distdl, status

# An interpreter looks for this by itself: the rank ends with the first import of a module.
AT_IMPORT = """
import os, sys
rank, _, module = os.environ.get("KILL", "").partition(" ")
if rank and os.environ.get("RANK") == rank:
    sys.addaudithook(
        lambda event, args: event == "import" and args[0] == module and os.kill(os.getpid(), 9)
    )
"""
AT_HOOK = """
import os
from lightning.pytorch import Callback
from distdl.models import ImageClassifier

rank, _, moment = os.environ.get("KILL", "").partition(" ")

def end(name):
    if (os.environ.get("RANK"), name) == (rank, moment):
        os.kill(os.getpid(), 9)

class Model(ImageClassifier):
    def __init__(self, **given):
        super().__init__(**given)
        end("building")

class Killer(Callback):
    def on_fit_start(self, *_): end("fit start")
    def on_train_batch_end(self, trainer, *_): trainer.global_step == 2 and end("training")
    def on_save_checkpoint(self, *_): end("checkpoint")
    def on_validation_batch_start(self, *_): end("validation")
    def on_train_end(self, *_): end("train end")
    def teardown(self, *_, stage): end("teardown")
"""
SHORT = ("data.train_samples=16", "data.val_samples=8", "data.batch_size=2", "trainer.max_epochs=1")
MOMENTS = [
    (1, "torch"),
    (0, "checkpoint"),
    (0, "omegaconf"),
    (0, "distdl.worker.build"),
    (1, "building"),
    (1, "fit start"),
    (0, "training"),
    (1, "validation"),
    (1, "train end"),
    (1, "teardown"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="torch's agent elsewhere says less")
@pytest.mark.parametrize(
    ("rank", "moment"), MOMENTS if os.environ.get("DISTDL_MATRIX") else MOMENTS[:2]
)
def test_a_killed_rank_is_named(rank: int, moment: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    (tmp_path / "killer.py").write_text(AT_HOOK)
    mine = ("model._target_=killer.Model", "+callbacks.killer._target_=killer.Killer")
    done = distdl(
        *(*TINY, *SHORT, *mine, "trainer.devices=2", "strategy=ddp", "name=k"),
        cwd=tmp_path,
        env={"KILL": f"{rank} {moment}", "PYTHONPATH": str(tmp_path)},
        module=UNCHECKED,
    )
    assert done.returncode == 128 + 9, done.stdout + done.stderr
    assert f"rank {rank} failed first: killed by SIGKILL" in done.stderr
    run = tmp_path / "outputs/default/k"
    record = status(run)
    assert record["state"] == "FAILED" and record["exit_code"] == 137
    assert record["error"].startswith(f"rank {rank}: killed by SIGKILL on ")
    assert (record["first_error"]["rank"], record["first_error"]["signal"]) == (rank, "SIGKILL")
    error = json.loads((run / f"attempts/001/errors/rank_{rank}.json").read_text())
    assert error["type"] == "Killed"
