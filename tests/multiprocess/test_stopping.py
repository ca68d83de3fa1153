"""SIGTERM and SIGUSR1: every rank ends at the same step, saved, and says so."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from distdl.job import EXIT_PREEMPTED
from distdl.util.seeds import stable_seed
from tests.conftest import TINY, UNCHECKED, distdl, last_step, losses, samples, status, trained

TWO = ("data.batch_size=4", "trainer.devices=2", "strategy=ddp")


def workers(parent: int) -> dict[int, int]:
    """rank -> pid of the processes below `parent`."""
    found = {}
    for child in psutil.Process(parent).children(recursive=True):
        try:
            if "distdl.worker" in child.cmdline():
                found[int(child.environ()["RANK"])] = child.pid
        except (psutil.Error, KeyError):
            continue
    return found


def listening(parent: int) -> set[str]:
    """The addresses at which a command's processes can be reached."""
    processes = [psutil.Process(parent), *psutil.Process(parent).children(recursive=True)]
    found = [each for process in processes for each in process.net_connections("inet")]
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGUSR1), (2, signal.SIGTERM)])
def test_a_signal_in_training(ranks, number, background, tmp_path) -> None:
    """To one rank of two, and all agree; the launcher gets it in the tests below."""
    run = tmp_path / "outputs/default/s"
    short = (*(TWO if ranks == 2 else ()), "trainer.max_epochs=2", "name=s")
    unset = {"GLOO_SOCKET_IFNAME": ""}
    job = background(*TINY, *short, cwd=tmp_path, module=UNCHECKED, env=unset)
    job.until(lambda: last_step(run) >= 5)
    assert listening(job.process.pid) == ({"127.0.0.1"} if ranks == 2 else set())
    os.kill(workers(job.process.pid)[1] if ranks == 2 else job.process.pid, number)
    assert job.wait() == EXIT_PREEMPTED, job.output()
    told = status(run)
    assert told["state"] == "PREEMPTED" and told["exit_code"] == EXIT_PREEMPTED
    manifest = json.loads((run / "checkpoints/last.ckpt.manifest.json").read_text())
    assert manifest["reason"] == "signal"
    steps = {max(step for _, step in rows) for rows in per_rank(run).values()}
    assert steps == {manifest["step"]}, "all ranks ended at the step that was saved"
    assert "python -m distdl resume" in job.output()
    if ranks == 1:
        return

    done = distdl("resume", str(run), cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert min(step for _, step in samples(run)[2]) == manifest["step"] + 1
    assert sorted(losses(run)) == list(range(1, 41))


def per_rank(run: Path) -> dict[str, list[tuple[int, int]]]:
    return {
        path.name: [
            (int(line.split(",")[1]), int(line.split(",")[2]))
            for line in path.read_text().splitlines()
            if line.startswith("1,")
        ]
        for path in (run / "logs").glob("samples-rank*.csv")
    }


def test_a_signal_in_validation(background, tmp_path) -> None:
    """Validation starts again from its first batch, and then the next epoch follows."""
    run = tmp_path / "outputs/default/v"
    long = ("data.val_samples=800", "trainer.max_epochs=2", "name=v")
    job = background(*TINY, *TWO, *long, cwd=tmp_path, module=UNCHECKED)
    job.until(lambda: last_step(run) >= 20)
    job.until(lambda: "step 20 " in job.output())
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait() == EXIT_PREEMPTED, job.output()
    manifest = json.loads((run / "checkpoints/last.ckpt.manifest.json").read_text())
    assert (manifest["step"], manifest["reason"]) == (20, "signal")

    done = distdl("resume", str(run), cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("val/acc1") == 2, "the first epoch was validated after all"
    assert min(step for _, step in samples(run)[2]) == 21
    counted = status(run, 2)["metrics"]["val/samples"]
    assert counted == 800


def test_a_signal_to_every_process_of_the_job(background, tmp_path) -> None:
    """As Slurm and `timeout` send it: the loaders' workers get it too, and must not die first."""
    run = tmp_path / "outputs/default/g"
    job = background(*TINY, "data.num_workers=2", "name=g", cwd=tmp_path, module=UNCHECKED)
    job.until(lambda: last_step(run) >= 5)
    os.killpg(job.process.pid, signal.SIGTERM)
    assert job.wait() == EXIT_PREEMPTED, job.output()
    assert status(run)["state"] == "PREEMPTED"
    manifest = json.loads((run / "checkpoints/last.ckpt.manifest.json").read_text())
    assert manifest["reason"] == "signal"


@pytest.mark.parametrize(
    ("when", "number"), [("PENDING", signal.SIGUSR1), ("RUNNING", signal.SIGTERM)]
)
def test_a_signal_in_set_up(when, number, background, tmp_path) -> None:
    """Before there are ranks, and before they train."""
    run = tmp_path / "outputs/default/u"
    short = (*TWO, "data.train_samples=40", "trainer.max_epochs=1", "name=u")
    job = background(*TINY, *short, cwd=tmp_path, module=UNCHECKED)
    job.until(lambda: status(run).get("state") == when)
    os.kill(job.process.pid, number)
    assert job.wait() == EXIT_PREEMPTED, job.output()
    assert status(run)["state"] == "PREEMPTED" and "Traceback" not in job.output()
    if when == "PENDING":
        return
    trained(*short, "trainer.devices=1", cwd=tmp_path)
    assert status(run, 2)["state"] == "SUCCEEDED"


def test_a_rank_that_fails_is_named(tmp_path) -> None:
    """torchrun swallows exit codes and messages; the run's own files do not."""
    (tmp_path / "broken.py").write_text(
        "import torch\n"
        "from distdl.models import ImageClassifier\n"
        "class Broken(ImageClassifier):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        if self.global_rank == 1 and batch_idx == 2:\n"
        "            raise ValueError('bad weather on rank one')\n"
        "        return super().training_step(batch, batch_idx)\n"
    )
    given = (*TINY, *TWO, "model._target_=broken.Broken", "name=b")
    done = distdl(*given, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 1
    assert "rank 1 failed first: ValueError: bad weather on rank one" in done.stderr
    told = status(tmp_path / "outputs/default/b")
    assert told["state"] == "FAILED" and "bad weather" in told["error"]


def test_a_refusal_on_one_rank_is_all_that_is_shown(tmp_path) -> None:
    """The other ranks lose their connection by it, and say so in their files alone."""
    images = tmp_path / "images"
    for split in ("train", "val"):
        for name in ("a", "b"):
            (images / split / name).mkdir(parents=True)
            for number in range(12):
                image = Image.new("RGB", (40, 40), (10 * number, 99, 0))
                image.save(images / split / name / f"{number:02}.jpg")
    # The first one of rank 1's second batch.
    order = torch.randperm(24, generator=torch.Generator().manual_seed(stable_seed(42, 0)))
    damaged = sorted(images.glob("train/*/*.jpg"))[order[12]]
    damaged.write_bytes(damaged.read_bytes()[:-50])
    done = distdl(
        *[text for text in TINY if not text.startswith("data")],
        *("data=imagenet", f"data.root={images}", "data.num_classes=2", "data.image_size=32"),
        *(*TWO, "data.num_workers=0", "data.on_damaged=error", "seed=42", "name=d"),
        cwd=tmp_path,
        module=UNCHECKED,
    )
    assert done.returncode == 2
    assert f"rank 1 failed first: data.root: cannot decode {damaged}" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    run = tmp_path / "outputs/default/d"
    assert status(run)["error"].startswith("rank 1: data.root: cannot decode")
    assert "Traceback" in (run / "attempts/001/logs/rank_0.log").read_text()
