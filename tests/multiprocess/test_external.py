"""`torchrun -m distdl ...`, which people will type: somebody else has started the ranks."""

import re
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from distdl.report import data
from distdl.worker import main
from tests.conftest import TINY, UNCHECKED, distdl, environment, free_port, losses, samples, status
from tests.warm import Popen

SHORT = (*TINY, "data.train_samples=32", "data.val_samples=7", "trainer.max_epochs=1", "name=x")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "distdl")


def test_two_ranks_make_one_run(tmp_path):
    done = distdl(*SHORT, "data.batch_size=4", cwd=tmp_path, module=TORCHRUN)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "outputs/default").iterdir()
    assert [path.name for path in (run / "attempts").iterdir()] == ["001"]
    assert status(run)["state"] == "SUCCEEDED" and status(run)["metrics"]["val/samples"] == 7
    # Each rank had its half of every batch, and together they had each sample once.
    assert sorted(losses(run)) == [1, 2, 3, 4]
    steps = samples(run)[1].values()
    assert all(len(ids) == 8 for ids in steps)
    assert sorted(i for ids in steps for i in ids) == list(range(32))
    for rank in (0, 1):
        log = (run / f"attempts/001/logs/rank_{rank}.log").read_text()
        assert f"launcher=external: rank={rank} (RANK), world_size=2 (WORLD_SIZE)" in log
    assert OmegaConf.load(run / "attempts/001/launch.yaml").resources.devices == 2
    assert "devices" not in OmegaConf.load(run / "config.yaml").trainer
    assert done.stdout.count("run     outputs/default/x  (attempt 1)") == 1

    # The loss of the validation, in which one rank had a sample less, is that of one process.
    again = ("task=validate", "task.checkpoint=last", "trainer.devices=1", "data.batch_size=8")
    done = distdl("resume", str(run), *again, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    two, one = (status(run, attempt)["metrics"]["val/loss"] for attempt in (1, 2))
    assert one == pytest.approx(two, abs=1e-5)
    # Its metrics are at the checkpoint's step and epoch, and in no curve of the training.
    series = data.load(run).series
    assert series["validate/val/loss"].steps == [4] and 0 not in series["val/loss"].steps
    assert 0 not in series["epoch"].steps and set(series["epoch"].values) == {0.0}


SLOW = """
import atexit, os, time
if os.environ.get('RANK') == '0':
    atexit.register(time.sleep, 3)
"""


def test_torchrun_names_rank_0_as_the_cause_of_a_refusal(tmp_path, tmp_path_factory):
    """However long that rank takes to end: torchrun names the first that does."""
    slow = tmp_path_factory.mktemp("slow")
    (slow / "sitecustomize.py").write_text(SLOW)
    typed, env = (*SHORT, "trainer.devices=3"), {"PYTHONPATH": str(slow)}
    done = distdl(*typed, cwd=tmp_path, module=TORCHRUN, env=env)
    assert done.returncode != 0
    assert done.stderr.count("distdl: 1 problem, nothing was started") == 1
    assert "trainer.devices: the run asks for 3 per node, but the node has 2" in done.stderr
    ours, torchruns = done.stderr.split("leave it out: the number of started processes sets it")
    assert "Traceback" not in ours
    cause = torchruns[torchruns.index("Root Cause") :]
    assert re.search(r"rank +: 0 ", cause) and re.search(r"exitcode +: 2 ", cause)
    assert list(tmp_path.iterdir()) == []


def test_rank_0_speaks_for_all(tmp_path):
    """A dry run of two processes with the variables of mpirun, which keeps no store for them."""
    size = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    size["MASTER_PORT"] = str(free_port())
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = []
    for rank in "01":
        env = environment(OMPI_COMM_WORLD_RANK=rank, OMPI_COMM_WORLD_LOCAL_RANK=rank, **size)
        command = [sys.executable, "-m", "distdl", *SHORT, "dry_run=true"]
        processes.append(Popen(command, env=env, **options))
    (out, _), other = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    expected = ["run        outputs/default/x", "resources  1 x 2 cpu"]
    expected += ["# in each of the 2 processes that are running already:\npython -m distdl.worker"]
    assert all(text in out for text in expected)
    assert other == ("", "") and list(tmp_path.iterdir()) == []


def test_a_rank_resumes_a_run_until_it_has_finished(
    command, without_stage_2, monkeypatch, tmp_path
):
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    variables = dict(zip(names, "000011", strict=True)) | {"TORCHELASTIC_RUN_ID": "none"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "DISTDL_LAUNCHER": ""}
    folder, worked = tmp_path / "outputs/default/x", []
    run = str(folder)
    monkeypatch.setattr(main, "main", lambda arguments: worked.append(arguments) or 0)

    def torchrun(*typed):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return command(*typed)

    assert torchrun(*SHORT).code == 0
    (folder / "attempts/001/status.json").write_text('{"state": "FAILED"}')
    assert torchrun("resume", run, "trainer.max_epochs=5").code == 0
    assert worked == [[run, run, "--attempt", "1"], [run, run, "--attempt", "2"]]
    launch = OmegaConf.load(folder / "attempts/002/launch.yaml")
    assert launch.changes == {"trainer.max_epochs": 5}
    for refused, message in (
        (("resume", run, "trainer.devices=2"), "the run asks for 2 per node"),
        (("-m", "seed=1,2"), "torchrun has started several already"),
    ):
        result = torchrun(*refused)
        assert result.code == 2 and message in result.err
    (folder / "attempts/002/status.json").write_text('{"state": "SUCCEEDED"}')
    again = torchrun(*SHORT)
    assert again.code == 0 and "has finished: nothing to do" in again.out and len(worked) == 2
