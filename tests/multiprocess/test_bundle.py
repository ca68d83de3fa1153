"""A bundle is complete: copied anywhere, it is the run, also for nodes that share nothing."""

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
from tests.conftest import TINY, environment, losses, status
from tests.warm import Popen

MODEL = """
from distdl.models import ImageClassifier
class Mine(ImageClassifier):
    def on_fit_start(self):
        print("mine, from", __file__, flush=True)
        if self.global_rank == 1 and {fails}:
            raise SystemExit(7)
"""


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_stage_2: None) -> Path:
    """A bundle for two nodes with a class of the user's, moved away from where it was made."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "mine.py").write_text(MODEL.format(fails=False))
    monkeypatch.chdir(project)
    config = compose.compose(
        [*TINY, "+experiment=resnet50_ddp", "model._target_=mine.Mine", "trainer.max_epochs=1"]
    )
    planned = planning.plan(config)
    planned.resources = type(planned.resources)(2, 1, "cpu")
    planned.config.trainer.num_nodes = 2
    monkeypatch.setattr(start, "is_foreground", lambda config: False)
    attempt = start.create_attempt(planned, ["distdl"], start.snapshot_of(planned))
    moved = tmp_path / "elsewhere" / "bundle"
    shutil.copytree(attempt.path / "bundle", moved)
    assert (moved / "config.yaml").read_bytes() == (planned.run.path / "config.yaml").read_bytes()
    assert str(project) not in (moved / "launch.yaml").read_text()
    shutil.rmtree(project)
    return moved


def agents(bundle: Path, stores: list[Path], port: int) -> list[subprocess.Popen[str]]:
    started = []
    for rank, store in enumerate(stores):
        where = f"--nodes 2 --node-rank {rank} --devices 1 --main-port {port}".split()
        command = ["-m", "distdl.agent", *where, "--", str(bundle), str(store), "--attempt", "1"]
        started.append(
            Popen(
                [sys.executable, *command],
                env=environment(PYTHONPATH=str(bundle / "code")),
                cwd="/",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    return started


def ended(started: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [agent.communicate(timeout=120)[0] for agent in started]
    finally:
        for agent in started:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)


def test_two_nodes_that_share_nothing_train_and_go_on(bundle: Path, tmp_path: Path) -> None:
    stores = [tmp_path / "node0" / "run", tmp_path / "node1" / "run"]
    started = agents(bundle, stores, 29611)
    out, _ = ended(started)
    assert [agent.returncode for agent in started] == [0, 0], out
    assert f"mine, from {bundle}/code/project/mine.py" in out
    assert "rank  node  local  host" in out and "\n1     1     0" in out  # the table of births
    assert status(stores[0])["state"] == "SUCCEEDED"
    assert len(losses(stores[0])) == 10
    assert not list((stores[1] / "checkpoints").glob("*"))

    # The same command again is a restart by the scheduler: from the checkpoint, which the second
    # node does not have. It has nothing left to train.
    started = agents(bundle, stores, 29612)
    out, _ = ended(started)
    assert [agent.returncode for agent in started] == [0, 0], out
    assert "share no file system" in out
    sent = stores[1] / "checkpoints" / "epoch_000.ckpt"
    assert sent.read_bytes() == (stores[0] / "checkpoints" / "epoch_000.ckpt").read_bytes()
    assert status(stores[0])["restarts"] == 1


def test_a_rank_fails_with_its_own_code_on_every_node(bundle: Path, tmp_path: Path) -> None:
    (bundle / "code" / "project" / "mine.py").write_text(MODEL.format(fails=True))
    store = tmp_path / "shared"
    started = agents(bundle, [store, store], 29613)
    ended(started)
    assert started[1].returncode == 7
    assert started[0].returncode != 0
    error = RunDirectory(store).attempts()[0].first_error()
    assert error is not None and (error["rank"], error["exit_code"]) == (1, 7)


def test_a_store_of_another_run_is_refused(bundle: Path, tmp_path: Path, capsys) -> None:
    store = tmp_path / "taken"
    RunDirectory(store).create("seed: 1\n", {})
    assert main.main([str(bundle), str(store), "--attempt", "1"]) == 2
    assert "belongs to another run" in capsys.readouterr().err
    assert (store / "config.yaml").read_text() == "seed: 1\n"
