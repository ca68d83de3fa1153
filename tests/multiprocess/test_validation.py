"""Validation counts every sample exactly once, whatever does not divide. The example project."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from distdl.report import data
from tests.conftest import ROOT, UNCHECKED, distdl, losses, status, trained

TWO = ("trainer.devices=2", "strategy=ddp", "data.batch_size=4", "trainer.max_epochs=1", "name=v")


def test_one_sample_for_two_ranks(tmp_path) -> None:
    trained(*TWO, "data.val_samples=1", "data.train_samples=16", cwd=tmp_path)
    assert status(tmp_path / "outputs/default/v")["metrics"]["val/samples"] == 1


def test_one_sample_more_than_the_batches_hold(tmp_path) -> None:
    """The loss is that of one process over all of them."""
    trained(*TWO, "data.val_samples=9", "data.train_samples=16", cwd=tmp_path)
    run = tmp_path / "outputs/default/v"
    two = status(run)["metrics"]
    assert two["val/samples"] == 9
    again = ("task=validate", "task.checkpoint=last", "trainer.devices=1", "data.batch_size=8")
    done = distdl("resume", str(run), *again, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert status(run, 2)["metrics"]["val/loss"] == pytest.approx(two["val/loss"], abs=1e-5)
    # Its metrics are at the checkpoint's step and epoch, and in no curve of the training.
    series = data.load(run).series
    assert series["validate/val/loss"].steps == [2] and min(series["val/loss"].steps) > 0
    assert 0 not in series["epoch"].steps and set(series["epoch"].values) == {0.0}
    assert len(series["val/loss"].steps) == 1


def test_the_example_project_by_the_installed_command(tmp_path) -> None:
    """examples/my_project: a user's own module, data and configs, from its folder."""
    project = tmp_path / "my_project"
    shutil.copytree(ROOT / "examples/my_project", project, ignore=shutil.ignore_patterns("outputs"))
    typed = "experiment=forecast trainer.accelerator=cpu trainer.devices=2 name=x tracking=none"
    command = (str(sys.executable).removesuffix("python") + "distdl",)
    done = distdl(*typed.split(), "trainer.log_every_n_steps=1", cwd=project, module=command)
    assert done.returncode == 0, done.stdout + done.stderr
    run = project / "outputs/forecast/x"
    manifest = json.loads((run / "checkpoints/best.ckpt.manifest.json").read_text())
    assert manifest["metrics"]["val/mse"] < 0.02
    assert "the model's own configure_optimizers" in done.stdout
    # 2,000 windows in batches of 50 per device, five epochs.
    assert len(losses(run)) == 5 * 2000 // (50 * 2)
