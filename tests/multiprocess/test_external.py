"""`torchrun -m distdl ...`, which people will type: somebody else has started the ranks."""

import re

import pytest
from omegaconf import OmegaConf

from distdl.tools.pages import data
from tests.conftest import (
    TINY,
    UNCHECKED,
    distdl,
    free_port,
    losses,
    matrix_only,
    samples,
    status,
)

SHORT = (*TINY, "data.train_samples=32", "data.val_samples=7", "trainer.max_epochs=1", "name=x")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "distdl")


def succeeds(cwd, *words, module=TORCHRUN):
    done = distdl(*words, cwd=cwd, module=module)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_ranks_make_one_run(tmp_path):
    typed = (*SHORT, "data.batch_size=4")
    printed = succeeds(tmp_path, *typed)
    (run,) = (tmp_path / "outputs/default").iterdir()
    assert [path.name for path in (run / "attempts").iterdir()] == ["001"]
    assert status(run)["state"] == "SUCCEEDED"
    assert status(run)["metrics"]["val/samples"] == 7
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
    assert printed.count("run     outputs/default/x  (attempt 1)") == 1


@matrix_only
def test_one_process_validates_as_two_ranks_did(tmp_path):
    """Also where one of the two had a sample less."""
    succeeds(tmp_path, *SHORT, "data.batch_size=4")
    (run,) = (tmp_path / "outputs/default").iterdir()
    alone = ("task=validate", "task.checkpoint=last", "trainer.devices=1", "data.batch_size=8")
    succeeds(tmp_path, "resume", str(run), *alone, module=UNCHECKED)
    two, one = (status(run, attempt)["metrics"]["val/loss"] for attempt in (1, 2))
    assert one == pytest.approx(two, abs=1e-5)
    # Its metrics are at the checkpoint's step and epoch, and in no curve of the training.
    series = data.load(run).series
    assert series["validate/val/loss"].steps == [4]
    assert 0 not in series["val/loss"].steps
    assert 0 not in series["epoch"].steps
    assert set(series["epoch"].values) == {0.0}


@matrix_only
def test_a_finished_run_is_left_alone_and_trains_longer(tmp_path):
    typed = (*SHORT, "data.batch_size=4")
    succeeds(tmp_path, *typed)
    (run,) = (tmp_path / "outputs/default").iterdir()
    assert "has finished: nothing to do" in succeeds(tmp_path, *typed)
    succeeds(tmp_path, "resume", str(run), "trainer.max_epochs=2")
    assert sorted(losses(run)) == list(range(1, 9))
    assert len(samples(run)[2]) == 4
    launch = OmegaConf.load(run / "attempts/002/launch.yaml")
    assert launch.changes == {"trainer.max_epochs": 2}


SLOW = """
import atexit, os, time
if os.environ.get('RANK') == '0':
    atexit.register(time.sleep, 3)
"""


@matrix_only
def test_torchrun_names_rank_0_as_the_cause_of_a_refusal(tmp_path, tmp_path_factory):
    """However long that rank takes to end: torchrun names the first that does."""
    slow = tmp_path_factory.mktemp("slow")
    (slow / "sitecustomize.py").write_text(SLOW)
    typed = (*SHORT, "trainer.devices=3")
    env = {"PYTHONPATH": str(slow)}
    done = distdl(*typed, cwd=tmp_path, module=TORCHRUN, env=env)
    assert done.returncode != 0
    assert done.stderr.count("distdl: 1 problem, nothing was started") == 1
    assert "trainer.devices: the run asks for 3 per node, but the node has 2" in done.stderr
    ours, torchruns = done.stderr.split("leave it out: the number of started processes sets it")
    assert "Traceback" not in ours
    cause = torchruns[torchruns.index("Root Cause") :]
    assert re.search(r"rank +: 0 ", cause)
    assert re.search(r"exitcode +: 2 ", cause)
    assert list(tmp_path.iterdir()) == []


def test_rank_0_speaks_for_all(tmp_path, background):
    """A dry run of two processes with the variables of mpirun, which keeps no store for them."""
    size = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    size["MASTER_PORT"] = str(free_port())
    started = []
    for rank in "01":
        env = {**size, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        started.append(background(*SHORT, "dry_run=true", cwd=tmp_path, env=env))
    assert [each.wait() for each in started] == [0, 0]
    out, other = [each.output() for each in started]
    expected = [
        "run        outputs/default/x",
        "resources  1 x 2 cpu",
        "# in each of the 2 processes that are running already:\npython -m distdl.worker",
    ]
    assert all(text in out for text in expected)
    assert other == ""
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_among_ranks_is_refused(command, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "0")
    assert "torchrun has started several already" in command("-m", "seed=1,2").err
