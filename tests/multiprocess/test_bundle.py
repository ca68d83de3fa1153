"""A bundle is complete: copied anywhere, it is the run, also for nodes that share nothing, and for
a project as a team has it (src layout, `import pytorch_lightning`)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distdl.config import compose
from distdl.launch import planning, start
from distdl.runs.directory import RunDirectory
from distdl.worker import main
from tests.conftest import TINY, distdl, environment, losses, python, status
from tests.warm import Popen

MODEL = """
from distdl.models import ImageClassifier
class Mine(ImageClassifier):
    def on_fit_start(self):
        print("mine, from", __file__, flush=True)
        if self.global_rank == 1 and {fails}:
            raise SystemExit(7)
"""
NET = """
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringDataModule as Data, BoringModel

class Net(BoringModel, pl.LightningModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("train/loss", loss)
        return loss

class Watch(pl.Callback):
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
trainer: {max_steps: 2, accelerator: cpu, log_every_n_steps: 1}
checkpoint: {monitor: null}
"""
FILES = {
    "project/mine.py": MODEL.format(fails=False),
    "project/pyproject.toml": "",
    "project/src/ours/net.py": NET,
    "project/src/ours/__init__.py": "",
    "project/conf/experiment/ours.yaml": EXPERIMENT,
    # A second copy of Lightning, as is installed with it, would not train here.
    "second/pytorch_lightning/__init__.py": "raise RuntimeError('the second copy')\n",
}
SERVED = "import pytorch_lightning: served by lightning.pytorch 2."


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "project"


def moved(project: Path, planned: planning.Plan) -> Path:
    """The bundle of a planned run, away from where it was made."""
    attempt = start.create_attempt(planned, ["distdl"], start.snapshot_of(planned))
    bundle = shutil.copytree(attempt.path / "bundle", project.parent / "elsewhere" / "bundle")
    assert (bundle / "config.yaml").read_bytes() == (planned.run.path / "config.yaml").read_bytes()
    assert str(project) not in (bundle / "launch.yaml").read_text()
    shutil.rmtree(project)
    return bundle


@pytest.fixture
def bundle(project: Path, monkeypatch: pytest.MonkeyPatch, without_stage_2: None) -> Path:
    """A bundle for two nodes with a class of the user's."""
    mine = ("+experiment=resnet50_ddp", "model._target_=mine.Mine", "trainer.max_epochs=1")
    planned = planning.plan(compose.compose([*TINY, *mine]))
    planned.resources = type(planned.resources)(2, 1, "cpu")
    planned.config.trainer.num_nodes = 2
    monkeypatch.setattr(start, "is_foreground", lambda config: False)
    return moved(project, planned)


def run_agents(bundle: Path, stores: list[Path], port: int) -> tuple[list[int], str]:
    """Exit codes, and the output of the first."""
    started = []
    for rank, store in enumerate(stores):
        where = f"--nodes 2 --node-rank {rank} --devices 1 --main-port {port}".split()
        command = ["-m", "distdl.agent", *where, "--", str(bundle), str(store), "--attempt", "1"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        env = environment(PYTHONPATH=str(bundle / "code"))
        options = {"cwd": "/", "text": True, "start_new_session": True, **pipes}
        started.append(Popen([sys.executable, *command], env=env, **options))
    try:
        output = [agent.communicate(timeout=120)[0] for agent in started]
    finally:
        for agent in started:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    return [agent.returncode for agent in started], output[0]


def test_two_nodes_that_share_nothing_train_and_resume(bundle: Path, tmp_path: Path) -> None:
    stores = [tmp_path / "node0" / "run", tmp_path / "node1" / "run"]
    codes, out = run_agents(bundle, stores, 29611)
    assert codes == [0, 0], out
    assert f"mine, from {bundle}/code/project/mine.py" in out
    assert "rank  node  local  host" in out and "\n1     1     0" in out  # the table of births
    assert status(stores[0])["state"] == "SUCCEEDED" and len(losses(stores[0])) == 10
    assert not list((stores[1] / "checkpoints").glob("*"))
    # The same command again is a restart by the scheduler: from the checkpoint, which the second
    # node does not have. It has nothing left to train.
    codes, out = run_agents(bundle, stores, 29612)
    assert codes == [0, 0] and "share no file system" in out, out
    first, second = (store / "checkpoints/epoch_000.ckpt" for store in stores)
    assert first.read_bytes() == second.read_bytes() and status(stores[0])["restarts"] == 1


def test_a_rank_fails_with_its_own_code_on_every_node(bundle: Path, tmp_path: Path) -> None:
    (bundle / "code/project/mine.py").write_text(MODEL.format(fails=True))
    store = tmp_path / "shared"
    (first, second), _ = run_agents(bundle, [store, store], 29613)
    assert second == 7 and first != 0
    error = RunDirectory(store).attempts()[0].first_error()
    assert error is not None and (error["rank"], error["exit_code"]) == (1, 7)


def test_a_store_of_another_run_is_refused(bundle: Path, tmp_path: Path, capsys) -> None:
    RunDirectory(tmp_path / "taken").create("seed: 1\n", {})
    assert main.main([str(bundle), str(tmp_path / "taken"), "--attempt", "1"]) == 2
    assert "belongs to another run" in capsys.readouterr().err
    assert (tmp_path / "taken/config.yaml").read_text() == "seed: 1\n"


def test_one_experiment_file_is_enough(project: Path) -> None:
    second = {"PYTHONPATH": str(project.parent / "second")}
    done = distdl("experiment=ours", "name=a", cwd=project, env=second)
    out = done.stdout + done.stderr
    assert done.returncode == 0, out
    assert f"net, from {project}/src/ours/net.py" in out and out.count(SERVED) == 1
    assert len(losses(project / "outputs/ours/a")) == 2


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_a_job_trains_from_its_copy(project: Path, without_stage_2: None) -> None:
    job = ["experiment=ours", "launcher=slurm", "trainer.devices=1"]
    bundle, store = moved(project, planning.plan(compose.compose(job))), project.parent / "store"
    done = python(
        *("-m", "distdl.worker", str(bundle), str(store), "--attempt", "1"),
        env={"PYTHONPATH": str(bundle / "code"), "DISTDL_LAUNCHER": "single"},
        cwd=Path("/"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"net, from {bundle}/code/project/src/ours/net.py" in done.stdout
    assert SERVED in done.stdout + done.stderr and status(store)["state"] == "SUCCEEDED"
