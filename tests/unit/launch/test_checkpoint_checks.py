"""Checks before the start: a task lacks its checkpoint, or nodes could not write a whole one."""

from types import SimpleNamespace

import pytest

from distdl.config import compose
from distdl.job import Resources
from distdl.launch import checkpoint_checks
from distdl.launchers.kubernetes import KubernetesLauncher
from distdl.launchers.mpi import MpiLauncher
from distdl.launchers.sagemaker import SageMakerLauncher
from distdl.launchers.slurm import SlurmLauncher
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


@pytest.mark.parametrize(
    ("kind", "words", "remedy"),
    [
        (KubernetesLauncher, ["launcher.store=s3://b/x"], "launcher.store=pvc://..."),
        (KubernetesLauncher, ["launcher.store=pvc://claim"], None),
        (SageMakerLauncher, [], "trainer.num_nodes=1"),
        (MpiLauncher, ["launcher.copy_bundle=true"], "launcher.copy_bundle=false"),
        (MpiLauncher, [], None),
        (SlurmLauncher, [], None),
    ],
)
def test_parts_of_a_checkpoint_need_a_folder_that_all_nodes_share(kind, words, remedy):
    name = kind.__name__.removesuffix("Launcher").lower()
    config = compose.compose(["checkpoint.sharded=true", f"launcher={name}", *words])
    found = [*checkpoint_checks.for_parts(config, kind, Resources(2, 8, "gpu"))]
    assert [each.path for each in found] == ["checkpoint.sharded"] * bool(remedy)
    assert all(f"checkpoint.sharded=false, or {remedy}" in each.remedy for each in found)
    assert not [*checkpoint_checks.for_parts(config, kind, Resources(1, 8, "gpu"))]
    config.checkpoint.sharded = False
    assert not [*checkpoint_checks.for_parts(config, kind, Resources(2, 8, "gpu"))]
