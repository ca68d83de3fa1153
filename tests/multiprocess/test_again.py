"""A named run that has finished is not trained again, and can be trained longer."""

from __future__ import annotations

from tests.conftest import UNCHECKED, distdl, losses, status, trained

SHORT = ("trainer.max_epochs=1", "data.train_samples=32", "name=n")


def test_finished_runs_and_longer_ones(tmp_path) -> None:
    run = tmp_path / "outputs/default/n"
    trained(*SHORT, "callbacks=[default,ema]", cwd=tmp_path)
    assert "has finished: nothing to do" in trained(*SHORT, "callbacks=[default,ema]", cwd=tmp_path)
    assert not (run / "attempts/002").exists()

    done = distdl("resume", str(run), "trainer.max_epochs=2", cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(losses(run)) == list(range(1, 9)), "the second epoch follows the first"
    assert status(run, 2)["metrics"]["val/samples"] == 21
