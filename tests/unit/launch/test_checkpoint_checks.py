"""A task that lacks its checkpoint says what to type."""

from types import SimpleNamespace

from distdl.config import compose
from distdl.launch import checkpoint_checks
from distdl.runs.directory import RunDirectory


def test_a_task_without_a_checkpoint_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose.compose(["task=predict", "model=resnet18", "seed=3"])
    run = RunDirectory(tmp_path / "outputs/default/new")
    (problem,) = checkpoint_checks.for_task(config, run, compose.typed(config))
    train = "train first: python -m distdl model=resnet18 seed=3; then"
    assert problem.remedy == f"{train}: python -m distdl resume RUN task=predict"
    trained = SimpleNamespace(path=tmp_path / "outputs/default/old one", checkpoints=tmp_path)
    (tmp_path / "last.ckpt").touch()
    monkeypatch.setattr(checkpoint_checks.jobs, "runs_below", lambda folder: [trained])
    (problem,) = checkpoint_checks.for_task(config, run, compose.typed(config))
    assert "python -m distdl resume 'outputs/default/old one' task=predict" in problem.remedy
