"""A bundle is complete: copied anywhere, it is the run, also for nodes that share nothing, and for
a project as a team has it (src layout, `import pytorch_lightning`)."""

import os
import shutil
import signal
import subprocess
import sys

from distdl.config import compose
from distdl.launch import planning, start
from distdl.runs.directory import RunDirectory
from distdl.worker import main
from tests.adoption.project import Project
from tests.adoption.table import IDIOMS
from tests.conftest import environment, free_port, losses, status
from tests.warm import Popen


def run_agents(bundle, stores, **variables):
    """Exit codes, and the output of the first."""
    started, port = [], free_port()
    for rank, store in enumerate(stores):
        where = f"--nodes 2 --node-rank {rank} --devices 1 --main-port {port}".split()
        command = ["-m", "distdl.agent", *where, "--", str(bundle), str(store), "--attempt", "1"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        env = environment(PYTHONPATH=str(bundle / "code"), **variables)
        options = {"cwd": "/", "text": True, "start_new_session": True, **pipes}
        started.append(Popen([sys.executable, *command], env=env, **options))
    try:
        output = [agent.communicate(timeout=120)[0] for agent in started]
    finally:
        for agent in started:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    return [agent.returncode for agent in started], output[0]


def test_two_nodes_that_share_nothing_train_and_resume(
    without_stage_2, tmp_path, monkeypatch, capsys
):
    project = Project(IDIOMS["contrastive"], tmp_path / "ours").folder
    (project / "src").mkdir()
    for file in project.glob("*.py"):
        file.rename(project / "src" / file.name)
    (project / "pyproject.toml").touch()
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path])
    where = ["trainer.num_nodes=2", "trainer.devices=1", "launcher=slurm"]
    planned = planning.plan(compose.compose(["experiment=ours", *where]))
    attempt = start.create_attempt(planned, ["distdl"], start.snapshot_of(planned))
    bundle = shutil.copytree(attempt.path / "bundle", tmp_path / "elsewhere/bundle")
    assert (bundle / "config.yaml").read_bytes() == (planned.run.path / "config.yaml").read_bytes()
    assert str(project) not in (bundle / "launch.yaml").read_text()
    shutil.rmtree(project)

    stores = [tmp_path / "node0" / "run", tmp_path / "node1" / "run"]
    codes, out = run_agents(bundle, stores, SEEN=str(tmp_path))
    assert codes == [0, 0], out
    assert "import pytorch_lightning: served by lightning.pytorch 2." in out
    assert "rank  node  local  host" in out and "\n1     1     0" in out  # the table of ranks
    assert status(stores[0])["state"] == "SUCCEEDED" and len(losses(stores[0])) == 12
    assert len((tmp_path / "rank1.jsonl").read_text().splitlines()) == 12
    assert not list((stores[1] / "checkpoints").glob("*"))
    # The same command again is a restart by the scheduler: from the checkpoint, which the second
    # node does not have. It has nothing left to train.
    codes, out = run_agents(bundle, stores)
    assert codes == [0, 0] and "share no file system" in out, out
    first, second = (next(store.glob("checkpoints/epoch_002.ckpt")) for store in stores)
    assert first.read_bytes() == second.read_bytes() and status(stores[0])["restarts"] == 1

    RunDirectory(tmp_path / "taken").create("seed: 1\n", {})
    assert main.main([str(bundle), str(tmp_path / "taken"), "--attempt", "1"]) == 2
    assert "belongs to another run" in capsys.readouterr().err
    assert (tmp_path / "taken/config.yaml").read_text() == "seed: 1\n"
