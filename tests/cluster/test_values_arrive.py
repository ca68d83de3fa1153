"""Through the real sbatch and mpirun a value arrives byte for byte. No torch is needed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from distdl.job import JobSpec, JobState, Resources
from distdl.launchers.mpi import MpiLauncher
from distdl.launchers.slurm import SlurmLauncher
from tests.cluster.slurm_cluster import SlurmCluster, slurm
from tests.cluster.test_mpi import MISSING, MPIRUN

__all__ = ["slurm"]

pytestmark = pytest.mark.xdist_group("slurm")

VALUES = {
    "NEWLINES": "a\n\n\n\nb\n",
    "DIRECTIVE": "\r\n#SBATCH --array=0-9\r\n",
    "SHELL": "$(exit 3) `exit 4` \"'\\ \\n %s %% $HOME ~ * @env@ a,b;c",
    "UNICODE": "Grüße 日本\u2028\x85 🎉",
    "EMPTY": "",
}


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """In place of the interpreter: says which variables a rank has."""
    file = tmp_path / "probe"
    file.write_text('#!/bin/sh\nenv -0 > "$SEEN.part" && mv "$SEEN.part" "$SEEN"\n')
    file.chmod(0o755)
    return file


def spec(folder: Path) -> JobSpec:
    store = folder / "runs/e/first"
    made = JobSpec(
        name="e/first",
        bundle=str(store / "attempts/001/bundle"),
        store=str(store),
        attempt=1,
        resources=Resources(1, 1, "cpu"),
        env=VALUES,
    )
    Path(made.bundle).mkdir(parents=True)
    return made


def seen(file: Path) -> dict[str, str]:
    deadline = time.monotonic() + 120
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    words = os.fsdecode(file.read_bytes()).split("\0")[:-1]
    found = dict(word.split("=", 1) for word in words)
    return {name: found[name] for name in VALUES}


def test_sbatch(
    slurm: SlurmCluster, probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.env[name])
    env = {"SEEN": str(tmp_path / "seen")}
    launcher = SlurmLauncher(python=str(probe), env=env, poll_seconds=0.5)
    job = launcher.submit(launcher.request(spec(tmp_path)))
    assert seen(tmp_path / "seen") == VALUES
    assert not isinstance(job, list) and job.wait() is JobState.SUCCEEDED


@pytest.mark.skipif(bool(MISSING), reason="apt-get install openmpi-bin mpich")
@pytest.mark.parametrize("mpirun", MPIRUN.values(), ids=MPIRUN)
def test_mpirun(mpirun: str, probe: Path, tmp_path: Path) -> None:
    env = {"SEEN": str(tmp_path / "seen")}
    launcher = MpiLauncher(mpirun=mpirun, python=str(probe), env=env)
    job = launcher.submit(launcher.request(spec(tmp_path)))
    assert seen(tmp_path / "seen") == VALUES
    assert job.wait() is JobState.SUCCEEDED
