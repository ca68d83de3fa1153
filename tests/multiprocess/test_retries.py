"""launcher.max_attempts on this machine: what may heal is started again, what cannot is not."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import TINY, UNCHECKED, distdl, losses, samples, status

# The steps at which the first, second, ... attempt fails are $AT.
MODEL = """
import os
from pathlib import Path
from distdl.models import ImageClassifier

class Failing(ImageClassifier):
    def on_train_batch_start(self, batch, batch_idx):
        attempts = len(list(Path("outputs/default/r/attempts").glob("[0-9]*")))
        if [str(self.global_step)] == os.environ["AT"].split()[attempts - 1 : attempts]:
            os.kill(os.getpid(), 9) if "KILL" in os.environ else self.fail()

    def fail(self):
        raise ValueError("step 3 is bad")  # the line
"""
RUN = (
    *TINY,
    "model._target_=mine.Failing",
    "launcher.max_attempts=5",
    "name=r",
    "data.train_samples=48",
    "data.val_samples=8",
    "data.batch_size=4",
    "trainer.max_epochs=1",
)
MATRIX = "DISTDL_MATRIX" in os.environ


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODEL)
    return tmp_path


def attempts(project: Path) -> int:
    return len(list((project / "outputs/default/r/attempts").glob("[0-9]*")))


@pytest.mark.parametrize("devices", [1, 2] if MATRIX else [1])
def test_a_bug_is_not_started_a_third_time(project: Path, devices: int) -> None:
    size = f"trainer.devices={devices}"
    done = distdl(*RUN, size, cwd=project, env={"AT": "3 3 3"}, module=UNCHECKED)
    assert done.returncode == 1, done.stdout + done.stderr
    assert attempts(project) == 2, done.stdout + done.stderr
    line = MODEL.splitlines().index('        raise ValueError("step 3 is bad")  # the line') + 1
    why = (
        "not started again: it failed twice at step 3 with the same error: ValueError"
        f" (mine.py, line {line}, in fail)"
    )
    assert done.stderr.count(why) == 1, done.stderr
    last = project / "outputs/default/r/attempts/002"
    assert why in (last / "incident.md").read_text()
    assert json.loads((last / "incident.json").read_text())["not_restarted"] == why


@pytest.mark.skipif(not MATRIX, reason="make matrix")
def test_kills_do_not_use_up_the_budget_while_it_gets_on(project: Path) -> None:
    """As many starts as kills, though one start without progress is allowed."""
    more = ("trainer.devices=2", "launcher.max_attempts=1", "checkpoint.every_n_steps=1")
    kills = {"AT": "2 4", "KILL": "1"}
    done = distdl(*RUN, *more, cwd=project, env=kills, module=UNCHECKED)
    run = project / "outputs/default/r"
    assert done.returncode == 0, done.stderr
    assert status(run, 3)["state"] == "SUCCEEDED", done.stderr
    assert done.stderr.count("failed: starting again (0 more)") == 2
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]
    steps = {step: ids for attempt in (1, 2, 3) for step, ids in samples(run)[attempt].items()}
    assert sorted(each for ids in steps.values() for each in ids) == list(range(48))


@pytest.mark.parametrize("devices", [1, 2] if MATRIX else [2])
def test_a_command_that_is_asked_to_end_starts_nothing(project, background, devices: int) -> None:
    more = (f"trainer.devices={devices}", "data.train_samples=100000")
    job = background(*RUN, *more, cwd=project, env={"AT": ""}, module=UNCHECKED)
    run = project / "outputs/default/r"
    job.until(lambda: (run / "logs/metrics.jsonl").exists() and len(losses(run)) > 2)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.output()
    assert attempts(project) == 1, job.output()
    assert status(run)["state"] == "PREEMPTED"
