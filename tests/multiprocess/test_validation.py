"""Validation counts every sample exactly once, whatever does not divide."""

from __future__ import annotations

import pytest

from tests.conftest import UNCHECKED, distdl, status, trained

TWO = ("trainer.devices=2", "strategy=ddp", "data.batch_size=4", "trainer.max_epochs=1")


@pytest.mark.parametrize("count", [1, 9])
def test_counts_exactly_on_two_ranks(count, tmp_path) -> None:
    """One sample for two ranks, and one sample more than the batches hold."""
    few = (f"data.val_samples={count}", "data.train_samples=16", "name=v")
    trained(*TWO, *few, cwd=tmp_path)
    run = tmp_path / "outputs/default/v"
    two = status(run)["metrics"]
    assert two["val/samples"] == count
    again = ("task=validate", "task.checkpoint=last", "trainer.devices=1", "data.batch_size=8")
    assert _validated(run, tmp_path, *again)["val/loss"] == pytest.approx(two["val/loss"], abs=1e-5)


def _validated(run, cwd, *overrides: str) -> dict[str, float]:
    done = distdl("resume", str(run), *overrides, cwd=cwd, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return status(run, 2)["metrics"]
