"""kill -9 in the second epoch, while a checkpoint is written: the run resumes exactly.

One rank that is killed inside an epoch: test_own_parts. A run that an old commit (96581e3) made,
two ranks of `strategy=ddp` killed in their second epoch: tests/fixtures/frozen_run. Its
`losses.json` holds what that commit's own resume logged afterwards; one thing was edited, the path
of the project in launch.yaml.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from distdl.runs.checkpoints import CheckpointStore, manifest_of
from tests.conftest import (
    TINY,
    UNCHECKED,
    Background,
    distdl,
    last_step,
    losses,
    samples,
    status,
    trained,
)

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "frozen_run"
# Three epochs; a checkpoint every third step, so some inside the second epoch. When the one of step
# 21 is begun, that of step 18 is written.
SAMPLES, STEPS = 128, 16
MANY = f"data.train_samples={SAMPLES}"
EVERY = (MANY, "checkpoint.every_n_steps=3")
RANKS = {1: ("data.batch_size=8",), 2: ("data.batch_size=4", "trainer.devices=2", "strategy=ddp")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[int, Path]:
    """The same run of one and of two ranks at the same global batch, with few checkpoints."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    for ranks, overrides in RANKS.items():
        trained(*overrides, MANY, f"name=r{ranks}", cwd=folder)
    return {ranks: folder / f"outputs/default/r{ranks}" for ranks in RANKS}


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory) -> Path:
    """A run of two ranks that a kill -9 ended in its second epoch, in the middle of a write."""
    folder = tmp_path_factory.mktemp("killed")
    run = folder / "outputs/default/k"
    job = Background(*TINY, *RANKS[2], *EVERY, "name=k", cwd=folder, module=UNCHECKED)
    job.until(lambda: last_step(run) >= 22)
    job.until(lambda: any(run.glob("checkpoints/.epoch*.tmp")))
    job.kill_all()
    return run


@pytest.fixture
def killed(killed_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(killed_run, tmp_path / "outputs/default/k")


def resumed(run: Path, *overrides: str, **more) -> str:
    done = distdl("resume", str(run), *overrides, cwd=run.parents[2], **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def step_of(checkpoint: Path | None) -> int:
    assert checkpoint is not None
    return json.loads(manifest_of(checkpoint).read_text())["step"]


def ids(rows: dict[tuple[int, int], list[int]], epoch: int) -> list[int]:
    return sorted(i for (e, _), row in rows.items() if e == epoch for i in row)


@pytest.mark.parametrize("after", [1, 2])
def test_resumes_exactly(after, uninterrupted, killed) -> None:
    (half,) = killed.glob("checkpoints/.epoch*.tmp")
    chosen = CheckpointStore(killed / "checkpoints").newest()
    newest = step_of(chosen)
    assert chosen.name != half.name.removeprefix(".").removesuffix(".tmp")
    assert STEPS < newest < 2 * STEPS, "a checkpoint from inside the second epoch"
    output = resumed(killed, f"trainer.devices={after}", module=UNCHECKED)
    assert "not resumable" not in output, "Lightning says so, and it is"
    assert ("global batch stays 8" in output) == (after == 1)
    assert not list((killed / "checkpoints").glob(".*")), "the half of a file is gone"
    first, second = samples(killed)[1], samples(killed)[2]
    assert min(step for _, step in second) == newest + 1
    surviving = {k: v for k, v in first.items() if k[1] <= newest} | second
    for epoch in range(3):
        assert ids(surviving, epoch) == list(range(SAMPLES)), f"epoch {epoch}: each sample once"
    result, expected = losses(killed), losses(uninterrupted[after])
    assert list(expected) == list(range(1, 3 * STEPS + 1)), "one and two ranks lose alike"
    steps = range(newest + 1, 3 * STEPS + 1)
    assert max(abs(result[s] - expected[s]) for s in steps) <= (0.0 if after == 2 else 1e-5)


def test_another_batch_after_damage(killed) -> None:
    """A damaged checkpoint is skipped; the rate is scaled, and both are reported."""
    newest, older, *_ = CheckpointStore(killed / "checkpoints").all()
    consumed = 16 * math.ceil((step_of(older) - STEPS) / 2)  # in batches of 16, rounded up
    for path in (newest, newest.with_name("last.ckpt")):  # one file with two names, before the copy
        path.write_bytes(path.read_bytes()[:-1])
    output = resumed(killed, "trainer.devices=1", "data.batch_size=16")
    assert "skipped a damaged checkpoint" in output
    assert "the global batch changes from 8 to 16, as asked for" in output
    assert "the learning rate goes from 0.003125 to 0.00625 (linear)" in output
    rows = samples(killed)[2]
    assert ids(rows, 2) == list(range(SAMPLES))
    assert len({*ids(rows, 1)}) == len(ids(rows, 1)) == SAMPLES - consumed
    assert status(killed, 2)["state"] == "SUCCEEDED"


def test_a_run_of_an_old_commit_is_resumed_with_the_same_losses(tmp_path: Path) -> None:
    run = shutil.copytree(FIXTURE / "run", tmp_path / "outputs/default/frozen")
    shutil.copy(FIXTURE / "mine.py", tmp_path)
    before = (run / "config.yaml").read_bytes()
    resumed(run, f"project.root={tmp_path}")
    assert status(run, 2)["state"] == "SUCCEEDED"
    assert (run / "config.yaml").read_bytes() == before
    expected, logged = json.loads((FIXTURE / "losses.json").read_text()), losses(run)
    assert {step: logged[int(step)] for step in expected} == pytest.approx(expected, rel=1e-6)


FULL = """
import resource, threading
from distdl.models import ImageClassifier
class Full(ImageClassifier):
    def on_train_batch_start(self, batch, batch_idx):
        if self.global_rank == 0 and batch_idx == 4:
            for thread in threading.enumerate():
                if thread.name.endswith(".ckpt"):
                    thread.join()
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
"""


def test_a_write_that_fails_ends_all_ranks(tmp_path) -> None:
    """Rank 0 alone writes; both report why they end, and what was written before stays."""
    (tmp_path / "full.py").write_text(FULL)
    every = ("checkpoint.every_n_steps=3", "model._target_=full.Full", "name=f")
    done = distdl(*TINY, *RANKS[2], *every, cwd=tmp_path, module=UNCHECKED)
    run = tmp_path / "outputs/default/f"
    assert done.returncode == 1, done.stdout + done.stderr
    reason = "epoch_000_step_00000006.ckpt could not be saved: OSError: [Errno 27] File too large"
    assert f"{reason}; earlier checkpoints are unchanged" in done.stderr
    assert status(run)["state"] == "FAILED" and reason in status(run)["error"]
    for rank in (0, 1):
        error = json.loads((run / f"attempts/001/errors/rank_{rank}.json").read_text())
        assert reason in error["message"] and error["type"] == "SaveError"
    assert step_of(CheckpointStore(run / "checkpoints").newest()) == 3
    assert last_step(run) < 12, "soon after"


def test_a_new_run_starts_from_another_by_a_relative_path(uninterrupted) -> None:
    """At a path below the current folder, as `convert` and the docs print it."""
    folder = uninterrupted[1].parents[2]
    more = ("trainer.max_epochs=4", "checkpoint.resume_from=outputs/default/r1", "name=on")
    printed = trained(*RANKS[1], MANY, *more, cwd=folder)
    assert list(losses(folder / "outputs/default/on")) == list(range(3 * STEPS + 1, 4 * STEPS + 1))
    assert "share no file system" not in printed


def test_a_finished_run_trains_longer(uninterrupted, tmp_path) -> None:
    run = shutil.copytree(uninterrupted[1], tmp_path / "outputs/default/r1")
    resumed(run, "trainer.max_epochs=4", module=UNCHECKED)
    assert sorted(losses(run)) == list(range(1, 4 * STEPS + 1)), "the epoch follows the others"
    assert status(run, 2)["metrics"]["val/samples"] == 21


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("checkpoint.resume_from=no/x.ckpt",), "resume_from=no/x.ckpt: no such checkpoint"),
        (("task=validate", "task.checkpoint=no"), "task.checkpoint=no: no such checkpoint"),
        (("task=validate", "task.checkpoint=best"), "this run has no best.ckpt"),
        (("launcher=mpi", "trainer.devices=2", "checkpoint.resume_from=x"), "an absolute path"),
    ],
)
def test_an_absent_start_is_refused_before_anything(
    command, without_stage_2, tmp_path, overrides, message
) -> None:
    result = command(*TINY, *overrides)
    assert result.code == 2 and message in result.err and not (tmp_path / "outputs").exists()
