"""A project as a team has it (src layout, `import pytorch_lightning`), from its folder to a trained
step: here, and as a job's copy of it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from distdl.config import compose
from distdl.launch import planning, start
from tests.conftest import distdl, losses, python, status

NET = """
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)


class Watch(Callback):
    def on_train_start(self, trainer, pl_module):
        print("net, from", __file__, flush=True)
"""
EXPERIMENT = """# @package _global_
# ours
defaults:
  - override /model: null
  - override /data: null
  - override /optimizer: none
  - override /schedule: none
  - override /tracking: none
model: {_target_: ours.net.Net}
data: {_target_: ours.net.Data}
callbacks:
  watch: {_target_: ours.net.Watch}
  timer: {_target_: pytorch_lightning.callbacks.Timer}
trainer: {max_epochs: 1, accelerator: cpu, log_every_n_steps: 1}
checkpoint: {monitor: null}
"""
SERVED = "import pytorch_lightning: served by lightning.pytorch 2."


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "project/pyproject.toml": "",
        "project/src/ours/net.py": NET,
        "project/src/ours/__init__.py": "",
        "project/conf/experiment/ours.yaml": EXPERIMENT,
        # A second copy of Lightning, as is installed with it, would not train here.
        "second/pytorch_lightning/__init__.py": "raise RuntimeError('the second copy')\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "project"


def test_one_experiment_file_is_enough(project: Path) -> None:
    second = {"PYTHONPATH": str(project.parent / "second")}
    done = distdl("experiment=ours", "name=a", cwd=project, env=second)
    out = done.stdout + done.stderr
    assert done.returncode == 0, out
    assert f"net, from {project}/src/ours/net.py" in out and out.count(SERVED) == 1
    assert len(losses(project / "outputs/ours/a")) == 2


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_a_job_trains_from_its_copy(
    project: Path, monkeypatch: pytest.MonkeyPatch, without_stage_2: None
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = compose.compose(["experiment=ours", "launcher=slurm", "trainer.devices=1"])
    planned = planning.plan(config)
    attempt = start.create_attempt(planned, ["distdl"], start.snapshot_of(planned))
    bundle, store = project.parent / "bundle", project.parent / "store"
    shutil.copytree(attempt.path / "bundle", bundle)
    shutil.rmtree(project)
    done = python(
        *("-m", "distdl.worker", str(bundle), str(store), "--attempt", "1"),
        env={"PYTHONPATH": str(bundle / "code"), "DISTDL_LAUNCHER": "single"},
        cwd=Path("/"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"net, from {bundle}/code/project/src/ours/net.py" in done.stdout
    assert SERVED in done.stdout + done.stderr and status(store)["state"] == "SUCCEEDED"
