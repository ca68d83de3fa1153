"""`distdl export`: what is refused before a network is built."""

import shutil

from tests.conftest import ROOT


def test_a_checkpoint_that_is_not_there_or_none_is_named_as_typed(command, tmp_path, monkeypatch):
    monkeypatch.setattr("distdl.cli.export.not_exportable", lambda recipe: None)
    shutil.copytree(ROOT / "tests/fixtures/frozen_run/run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints", ignore_errors=True)
    said = command("export", "run", "--to", "pt2")
    assert "run: this run has no checkpoint" in said.err
    assert "python -m distdl resume run" in said.err
    said = command("export", "run/checkpoints/e1.ckpt", "--to", "pt2")
    assert "run/checkpoints/e1.ckpt: there is no such checkpoint" in said.err
    (tmp_path / "run/checkpoints").mkdir()
    (tmp_path / "run/checkpoints/last.ckpt").write_text("cut")
    said = command("export", "run", "--to", "pt2")
    assert "run: is not a checkpoint" in said.err
    assert "task.checkpoint" not in said.err
