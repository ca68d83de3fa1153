"""kill -9 in the second epoch, while a checkpoint is written: the run resumes exactly.

One rank that is killed inside an epoch: test_own_parts.
"""

from __future__ import annotations

import json
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
def killed(tmp_path_factory) -> Path:
    """A run of two ranks that a kill -9 ended in its second epoch, in the middle of a write."""
    folder = tmp_path_factory.mktemp("killed")
    run = folder / "outputs/default/k"
    job = Background(*TINY, *RANKS[2], *EVERY, "name=k", cwd=folder, module=UNCHECKED)
    job.until(lambda: last_step(run) >= 22)
    job.until(lambda: any(run.glob("checkpoints/.epoch*.tmp")))
    job.kill_all()
    return run


def test_one_and_two_ranks_lose_alike(uninterrupted) -> None:
    one, two = losses(uninterrupted[1]), losses(uninterrupted[2])
    assert list(one) == list(two) == list(range(1, 3 * STEPS + 1))
    assert max(abs(one[s] - two[s]) for s in one) < 1e-5
    assert samples(uninterrupted[1])[1].keys() == samples(uninterrupted[2])[1].keys()


@pytest.mark.parametrize("after", [1, 2])
def test_resumes_exactly(after, uninterrupted, killed, tmp_path) -> None:
    run = tmp_path / "outputs/default/k"
    shutil.copytree(killed, run)
    (half,) = run.glob("checkpoints/.epoch*.tmp")
    chosen = CheckpointStore(run / "checkpoints").newest()
    assert chosen is not None and chosen.name != half.name.removeprefix(".").removesuffix(".tmp")
    newest = json.loads(manifest_of(chosen).read_text())["step"]
    assert STEPS < newest < 2 * STEPS, "a checkpoint from inside the second epoch"

    again = ("resume", str(run), f"trainer.devices={after}")
    done = distdl(*again, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not resumable" not in done.stdout + done.stderr, "Lightning says so, and it is"
    assert not list((run / "checkpoints").glob(".*")), "the half of a file is gone"

    first, second = samples(run)[1], samples(run)[2]
    assert min(step for _, step in second) == newest + 1
    surviving = {k: v for k, v in first.items() if k[1] <= newest} | second
    for epoch in range(3):
        ids = [i for (e, _), row in surviving.items() if e == epoch for i in row]
        assert sorted(ids) == list(range(SAMPLES)), f"epoch {epoch}: each sample once"
    got, wanted = losses(run), losses(uninterrupted[after])
    steps = range(newest + 1, 3 * STEPS + 1)
    assert max(abs(got[s] - wanted[s]) for s in steps) <= (0.0 if after == 2 else 1e-5)
    if after == 1:
        assert "global batch stays 8" in done.stdout


def test_a_damaged_checkpoint_is_skipped(killed, tmp_path) -> None:
    run = tmp_path / "outputs/default/k"
    shutil.copytree(killed, run)
    manifests = {json.loads(m.read_text())["step"]: m for m in run.glob("checkpoints/epoch*.json")}
    newest, older = sorted(manifests, reverse=True)[:2]
    file = manifests[newest].with_name(manifests[newest].name.removesuffix(".manifest.json"))
    for path in (file, file.with_name("last.ckpt")):  # one file with two names, before the copy
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    short = ("trainer.devices=1", "trainer.max_epochs=2")
    done = distdl("resume", str(run), *short, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped a damaged checkpoint" in done.stderr and "sha256 differs" in done.stderr
    assert min(step for _, step in samples(run)[2]) == older + 1


def test_another_batch_is_said_and_scales_the_rate(killed, tmp_path) -> None:
    run = tmp_path / "outputs/default/k"
    shutil.copytree(killed, run)
    done = distdl("resume", str(run), "trainer.devices=1", "data.batch_size=16", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the global batch changes from 8 to 16, as asked for" in done.stdout
    assert "the learning rate goes from 0.003125 to 0.00625 (linear)" in done.stderr
    ids = [i for (e, _), row in samples(run)[2].items() if e == 2 for i in row]
    assert sorted(ids) == list(range(SAMPLES))
    second = [i for (e, _), row in samples(run)[2].items() if e == 1 for i in row]
    assert len(second) == len(set(second)), "no sample twice in the epoch that was resumed"
    assert status(run, 2)["state"] == "SUCCEEDED"


def test_a_write_that_fails_ends_all_ranks(tmp_path) -> None:
    """Rank 0 alone writes; both say why they end, and what was written before stays."""
    (tmp_path / "full.py").write_text(
        "import resource, threading\n"
        "from distdl.models import ImageClassifier\n"
        "class Full(ImageClassifier):\n"
        "    def on_train_batch_start(self, batch, batch_idx):\n"
        "        if self.global_rank == 0 and batch_idx == 4:\n"
        "            for thread in threading.enumerate():\n"
        "                if thread.name.endswith('.ckpt'):\n"
        "                    thread.join()\n"
        "            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
    )
    every = ("checkpoint.every_n_steps=3", "model._target_=full.Full", "name=f")
    done = distdl(*TINY, *RANKS[2], *every, cwd=tmp_path, module=UNCHECKED)
    run = tmp_path / "outputs/default/f"
    assert done.returncode == 1, done.stdout + done.stderr
    said = "epoch_000_step_00000006.ckpt could not be saved: OSError: [Errno 27] File too large"
    assert f"{said}; the checkpoints before it are as they were" in done.stderr
    assert status(run)["state"] == "FAILED" and said in status(run)["error"]
    for rank in (0, 1):
        error = (run / f"attempts/001/errors/rank_{rank}.json").read_text()
        assert said in error and "SaveError" in error
    newest = CheckpointStore(run / "checkpoints").newest()
    assert newest is not None and newest.name == "epoch_000_step_00000003.ckpt"
    assert last_step(run) < 12, "soon after"


def test_a_new_run_starts_from_another_by_a_relative_path(uninterrupted) -> None:
    """At a path below the current folder, as `convert` and the docs print it."""
    folder = uninterrupted[1].parents[2]
    more = ("trainer.max_epochs=4", "checkpoint.resume_from=outputs/default/r1", "name=on")
    printed = trained(*RANKS[1], MANY, *more, cwd=folder)
    assert list(losses(folder / "outputs/default/on")) == list(range(3 * STEPS + 1, 4 * STEPS + 1))
    assert "share no file system" not in printed


def test_a_finished_run_is_not_trained_again_but_longer(uninterrupted, tmp_path) -> None:
    run = tmp_path / "outputs/default/r1"
    shutil.copytree(uninterrupted[1], run)
    printed = trained(*RANKS[1], MANY, "name=r1", cwd=tmp_path)
    assert "has finished: nothing to do" in printed and not (run / "attempts/002").exists()
    done = distdl("resume", str(run), "trainer.max_epochs=4", cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(losses(run)) == list(range(1, 4 * STEPS + 1)), "the epoch follows the others"
    assert status(run, 2)["metrics"]["val/samples"] == 21


def test_a_start_that_is_not_there_is_refused_before_anything(
    command, without_stage_2, tmp_path
) -> None:
    said = command(*TINY, "checkpoint.resume_from=nowhere/x.ckpt")
    assert said.code == 2 and not (tmp_path / "outputs").exists()
    assert "checkpoint.resume_from=nowhere/x.ckpt: no such checkpoint" in said.err
    for named, why in (("no.ckpt", "no such checkpoint"), ("best", "this run has no best.ckpt")):
        said = command(*TINY, "task=validate", f"task.checkpoint={named}")
        assert said.code == 2 and not (tmp_path / "outputs").exists()
        assert f"task.checkpoint={named}: {why}" in said.err
    mpi = ("launcher=mpi", "trainer.devices=2")
    said = command(*TINY, "checkpoint.resume_from=start.ckpt", *mpi)
    assert said.code == 2 and "an absolute path" in said.err
