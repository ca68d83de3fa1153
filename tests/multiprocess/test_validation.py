"""Validation counts every sample exactly once, whatever does not divide."""

from __future__ import annotations

import pytest

from distdl.report import data
from tests.conftest import UNCHECKED, distdl, status, trained

TWO = ("trainer.devices=2", "strategy=ddp", "data.batch_size=4", "trainer.max_epochs=1")


def test_one_sample_for_two_ranks(tmp_path) -> None:
    trained(*TWO, "data.val_samples=1", "data.train_samples=16", "name=v", cwd=tmp_path)
    assert status(tmp_path / "outputs/default/v")["metrics"]["val/samples"] == 1


def test_one_sample_more_than_the_batches_hold(tmp_path) -> None:
    """The loss is that of one process over all of them."""
    trained(*TWO, "data.val_samples=9", "data.train_samples=16", "name=v", cwd=tmp_path)
    run = tmp_path / "outputs/default/v"
    two = status(run)["metrics"]
    assert two["val/samples"] == 9
    again = ("task=validate", "task.checkpoint=last", "trainer.devices=1", "data.batch_size=8")
    assert _validated(run, tmp_path, *again)["val/loss"] == pytest.approx(two["val/loss"], abs=1e-5)
    # Its metrics stand at the checkpoint's step and epoch, and in no curve of the training.
    series = data.load(run).series
    assert series["validate/val/loss"].steps == [2] and min(series["val/loss"].steps) > 0
    assert 0 not in series["epoch"].steps and set(series["epoch"].values) == {0.0}
    assert len(series["val/loss"].steps) == 1


def _validated(run, cwd, *overrides: str) -> dict[str, float]:
    done = distdl("resume", str(run), *overrides, cwd=cwd, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return status(run, 2)["metrics"]
