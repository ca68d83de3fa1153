"""`torchrun -m distdl ...`, which people will type: somebody else has started the ranks."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from distdl.worker import main
from tests.conftest import TINY, Said, distdl, environment, losses, samples, status
from tests.warm import Popen

SHORT = (*TINY, "data.train_samples=32", "data.val_samples=7", "trainer.max_epochs=1", "name=x")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "distdl")


def test_two_ranks_make_one_run(tmp_path) -> None:
    done = distdl(*SHORT, "data.batch_size=4", cwd=tmp_path, module=TORCHRUN)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "outputs/default").iterdir()
    assert [path.name for path in (run / "attempts").iterdir()] == ["001"]
    assert status(run)["state"] == "SUCCEEDED" and status(run)["metrics"]["val/samples"] == 7
    # Each rank had its half of every batch, and together they had each sample once.
    assert sorted(losses(run)) == [1, 2, 3, 4]
    steps = samples(run)[1]
    assert all(len(ids) == 8 for ids in steps.values())
    assert sorted(i for ids in steps.values() for i in ids) == list(range(32))
    assert len([*(run / "logs").glob("samples-rank[01].csv")]) == 2
    # Which variable said what stands in each rank's log.
    for rank in (0, 1):
        log = (run / f"attempts/001/logs/rank_{rank}.log").read_text()
        assert f"launcher=external: rank={rank} (RANK), world_size=2 (WORLD_SIZE)" in log
    launch = OmegaConf.load(run / "attempts/001/launch.yaml")
    assert launch.resources.devices == 2
    assert "devices" not in OmegaConf.load(run / "config.yaml").trainer
    assert done.stdout.count("run     outputs/default/x  (attempt 1)") == 1


def test_a_refusal_under_torchrun_is_told_by_rank_0(tmp_path, tmp_path_factory) -> None:
    """However long that rank takes to end: torchrun names the first that does."""
    slow = tmp_path_factory.mktemp("slow")
    (slow / "sitecustomize.py").write_text(
        "import atexit, os, time\n"
        "if os.environ.get('RANK') == '0':\n"
        "    atexit.register(time.sleep, 5)\n"
    )
    typed = (*SHORT, "trainer.devices=3")
    done = distdl(*typed, cwd=tmp_path, module=TORCHRUN, env={"PYTHONPATH": str(slow)})
    assert done.returncode != 0
    assert done.stderr.count("distdl: 1 problem, nothing was started") == 1
    assert "trainer.devices: 3 per node are asked for, and 2 were started" in done.stderr
    ours, torchruns = done.stderr.split("leave it out: the number of processes says it")
    assert "Traceback" not in ours
    cause = torchruns[torchruns.index("Root Cause") :]
    assert re.search(r"rank +: 0 ", cause) and re.search(r"exitcode +: 2 ", cause)
    assert list(tmp_path.iterdir()) == []


def ranks(tmp_path: Path, *typed: str) -> list[tuple[int, str, str]]:
    """Two processes with the variables of mpirun, which keeps no store for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        Popen(
            [sys.executable, "-m", "distdl", *typed],
            cwd=tmp_path,
            env=environment(
                OMPI_COMM_WORLD_RANK=str(rank),
                OMPI_COMM_WORLD_SIZE="2",
                OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
                OMPI_COMM_WORLD_LOCAL_SIZE="2",
                MASTER_PORT=str(port),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120) for process in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


@pytest.mark.parametrize(
    ("typed", "ends", "words"),
    [
        ("trainer.devices=3", 2, ["3 per node are asked for"]),
        (
            "dry_run=true",
            *(0, ["run        outputs/default/x", "resources  1 x 2 cpu"]),
        ),
    ],
)
def test_rank_0_says_what_becomes_of_all(tmp_path, typed: str, ends: int, words: list[str]) -> None:
    (code, out, err), other = ranks(tmp_path, *SHORT, typed)
    assert code == ends and all(word in (err if code else out) for word in words)
    processes = "# the 2 processes that are running already, each:\npython -m distdl.worker"
    assert code or processes in out
    assert other == (ends, "", ""), "rank 0 says why, once"
    assert list(tmp_path.iterdir()) == []


# --- one rank of torchrun's in this process; its worker is only written down


@pytest.fixture
def torchrun(command, without_stage_2, monkeypatch) -> Callable[..., Said]:
    names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    variables = dict(zip(names, "000011", strict=True))
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    variables |= {"TORCHELASTIC_RUN_ID": "none", "DISTDL_LAUNCHER": ""}

    def run(*typed: str) -> Said:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return command(*typed)

    return run


@pytest.fixture
def worked(monkeypatch) -> list[list[str]]:
    calls: list[list[str]] = []
    monkeypatch.setattr(main, "main", lambda arguments: calls.append(arguments) or 0)
    return calls


def test_a_rank_that_others_started_resumes(torchrun, worked, tmp_path) -> None:
    folder = tmp_path / "outputs/default/x"
    run = str(folder)
    assert torchrun(*SHORT).code == 0
    (folder / "attempts/001/status.json").write_text('{"state": "FAILED"}')
    assert torchrun("resume", run, "trainer.max_epochs=5").code == 0
    assert worked == [[run, run, "--attempt", "1"], [run, run, "--attempt", "2"]]
    launch = OmegaConf.load(folder / "attempts/002/launch.yaml")
    assert launch.changes == {"trainer.max_epochs": 5}
    refused = torchrun("resume", run, "trainer.devices=2")
    assert refused.code == 2 and "2 per node are asked for, and 1 were started" in refused.err


def test_what_has_finished_is_not_trained_again(torchrun, worked, tmp_path) -> None:
    assert torchrun(*SHORT).code == 0
    (tmp_path / "outputs/default/x/attempts/001/status.json").write_text('{"state": "SUCCEEDED"}')
    again = torchrun(*SHORT)
    assert again.code == 0 and "has finished: nothing to do" in again.out
    assert len(worked) == 1


@pytest.mark.parametrize(
    ("typed", "code", "words"),
    [
        ("--cfg job seed=3", 0, "seed: 3"),
        ("-m seed=1,2", 2, "torchrun has started several already"),
        ("seed=1,2", 2, "seed"),
        ("resme x", 2, "resme"),
    ],
)
def test_what_is_no_training_is_not_trained(torchrun, worked, tmp_path, typed, code, words) -> None:
    said = torchrun(*typed.split())
    assert said.code == code and words in said.out + said.err
    assert worked == [] and list(tmp_path.iterdir()) == []
