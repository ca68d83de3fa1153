"""How an attempt ends early: by a signal all ranks end at the same step, saved; the rank that
fails or is killed is named."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from distdl.job import EXIT_PREEMPTED
from distdl.util.seeds import stable_seed
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

TWO = ("data.batch_size=4", "trainer.devices=2", "strategy=ddp", "trainer.max_epochs=2", "name=s")


def processes(parent: int) -> list[psutil.Process]:
    return [psutil.Process(parent), *psutil.Process(parent).children(recursive=True)]


def worker(parent: int, rank: int) -> int:
    """The pid of a rank below `parent`."""
    workers = [each for each in processes(parent) if "distdl.worker" in each.cmdline()]
    return next(each.pid for each in workers if each.environ().get("RANK") == str(rank))


def listening(parent: int) -> set[str]:
    """The addresses at which a command's processes can be reached."""
    sockets = [each for process in processes(parent) for each in process.net_connections("inet")]
    return {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}


def manifest(run: Path) -> dict:
    return json.loads((run / "checkpoints/last.ckpt.manifest.json").read_text())


def step_reached(number: int) -> Callable[[Background, Path], bool]:
    return lambda job, run: last_step(run) >= number


def state_is(state: str) -> Callable[[Background, Path], bool]:
    return lambda job, run: status(run).get("state") == state


CASES = {
    "one rank": (TWO[3:], signal.SIGUSR1, step_reached(5)),
    "rank 1 of two": (TWO, signal.SIGTERM, step_reached(5)),
    "in validation": (
        (*TWO, "data.val_samples=800"),
        signal.SIGTERM,
        lambda job, run: last_step(run) >= 20 and "step 20 " in job.output(),
    ),
    # As Slurm and `timeout` send it: the loaders' workers get it too, and must not die first.
    "every process": (("data.num_workers=2", "name=s"), signal.SIGTERM, step_reached(5)),
    "before there are ranks": (TWO, signal.SIGUSR1, state_is("PENDING")),
    "before they train": ((*TWO, "data.train_samples=40"), signal.SIGTERM, state_is("RUNNING")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_signal_ends_all_ranks_at_a_saved_step(case: str, background, tmp_path) -> None:
    overrides, number, moment = CASES[case]
    run, unset = tmp_path / "outputs/default/s", {"GLOO_SOCKET_IFNAME": ""}
    job = background(*TINY, *overrides, cwd=tmp_path, module=UNCHECKED, env=unset)
    job.until(lambda: moment(job, run))
    if "rank" in case and "before" not in case:
        assert listening(job.process.pid) == ({"127.0.0.1"} if TWO[0] in overrides else set())
    if case == "every process":
        os.killpg(job.process.pid, number)
    else:
        os.kill(worker(job.process.pid, 1) if "1" in case else job.process.pid, number)
    assert job.wait() == EXIT_PREEMPTED, job.output()
    record = status(run)
    assert (record["state"], record["exit_code"]) == ("PREEMPTED", EXIT_PREEMPTED)
    assert "Traceback" not in job.output()
    if case.startswith("before"):
        if case.endswith("train"):
            trained(*overrides, "trainer.devices=1", cwd=tmp_path)
            assert status(run, 2)["state"] == "SUCCEEDED"
        return
    assert manifest(run)["reason"] == "signal" and "python -m distdl resume" in job.output()
    rows = [path.read_text().splitlines() for path in (run / "logs").glob("samples-rank*.csv")]
    assert {int(lines[-1].split(",")[2]) for lines in rows} == {step := manifest(run)["step"]}
    if TWO[0] not in overrides:
        return
    done = distdl("resume", str(run), cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert min(step for _, step in samples(run)[2]) == step + 1
    assert sorted(losses(run)) == list(range(1, 41))
    if case == "in validation":  # it starts again from its first batch, then the next epoch follows
        assert step == 20 and done.stderr.count("val/acc1") == 2
        assert status(run, 2)["metrics"]["val/samples"] == 800


# An interpreter looks for this by itself: the rank ends with the first import of a module.
AT_IMPORT = """
import os, sys
rank, _, module = os.environ.get("END", "").partition(" ")
if rank and os.environ.get("RANK") == rank:
    sys.addaudithook(
        lambda event, args: event == "import" and args[0] == module and os.kill(os.getpid(), 9)
    )
"""
AT_HOOK = """
import os
from lightning.pytorch import Callback
from distdl.models import ImageClassifier

rank, _, moment = os.environ.get("END", "").partition(" ")

def end(name):
    if (os.environ.get("RANK"), name) == (rank, moment):
        os.kill(os.getpid(), 9)
    if (os.environ.get("RANK"), "raise " + name) == (rank, moment):
        raise ValueError("bad weather")

class Model(ImageClassifier):
    def __init__(self, **options):
        super().__init__(**options)
        end("building")

class Ends(Callback):
    def on_fit_start(self, *_): end("fit start")
    def on_train_batch_end(self, trainer, *_): trainer.global_step == 2 and end("training")
    def on_save_checkpoint(self, *_): end("checkpoint")
    def on_validation_batch_start(self, *_): end("validation")
    def on_train_end(self, *_): end("train end")
    def teardown(self, *_, stage): end("teardown")
"""
SHORT = ("data.train_samples=16", "data.val_samples=8", "data.batch_size=2", "trainer.max_epochs=1")
MOMENTS = [
    *((1, "torch"), (0, "checkpoint"), (1, "raise training")),
    *((0, "omegaconf"), (0, "distdl.worker.build"), (1, "building"), (1, "fit start")),
    *((0, "training"), (1, "validation"), (1, "train end"), (1, "teardown")),
]


@pytest.mark.skipif(sys.platform != "linux", reason="torch's agent elsewhere says less")
@pytest.mark.parametrize(
    ("rank", "moment"), MOMENTS if os.environ.get("DISTDL_MATRIX") else MOMENTS[:3]
)
def test_a_rank_that_ends_is_named(rank: int, moment: str, tmp_path: Path) -> None:
    """kill -9 at any moment, or an exception: torchrun swallows exit codes and messages."""
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    (tmp_path / "ends.py").write_text(AT_HOOK)
    mine = ("model._target_=ends.Model", "+callbacks.ends._target_=ends.Ends")
    done = distdl(
        *(*TINY, *TWO, *SHORT, *mine),
        cwd=tmp_path,
        env={"END": f"{rank} {moment}", "PYTHONPATH": str(tmp_path)},
        module=UNCHECKED,
    )
    killed = not moment.startswith("raise")
    code, kind = (137, "Killed") if killed else (1, "ValueError")
    message = "killed by SIGKILL on " if killed else "ValueError: bad weather"
    assert done.returncode == code, done.stdout + done.stderr
    assert f"rank {rank} failed first: {message}" in done.stderr
    run = tmp_path / "outputs/default/s"
    record = status(run)
    assert (record["state"], record["exit_code"]) == ("FAILED", code)
    assert record["error"].startswith(f"rank {rank}: {message}")
    first = record["first_error"]
    assert (first["rank"], first.get("signal")) == (rank, "SIGKILL" if killed else None)
    error = json.loads((run / f"attempts/001/errors/rank_{rank}.json").read_text())
    assert error["type"] == kind


def test_a_refusal_on_one_rank_is_all_that_is_shown(tmp_path) -> None:
    """The other ranks lose their connection by it, and record so in their files alone."""
    images = tmp_path / "images"
    for folder in (images / split / name for split in ("train", "val") for name in ("a", "b")):
        folder.mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (40, 40), (10 * number, 99, 0)).save(folder / f"{number:02}.jpg")
    # The first one of rank 1's second batch.
    order = torch.randperm(24, generator=torch.Generator().manual_seed(stable_seed(42, 0)))
    damaged = sorted(images.glob("train/*/*.jpg"))[order[12]]
    damaged.write_bytes(damaged.read_bytes()[:-50])
    data = ("data=imagenet", f"data.root={images}", "data.num_classes=2", "data.image_size=32")
    done = distdl(
        *[text for text in TINY if not text.startswith("data")],
        *(*TWO, *data, "data.num_workers=0", "data.on_damaged=error", "seed=42"),
        cwd=tmp_path,
        module=UNCHECKED,
    )
    assert done.returncode == 2
    assert f"rank 1 failed first: data.root: cannot decode {damaged}" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    run = tmp_path / "outputs/default/s"
    assert status(run)["error"].startswith("rank 1: data.root: cannot decode")
    assert "Traceback" in (run / "attempts/001/logs/rank_0.log").read_text()
