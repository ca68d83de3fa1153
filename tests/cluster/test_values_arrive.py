"""Through the real sbatch and mpirun a value arrives byte for byte. No torch is needed."""

import os
from pathlib import Path

import pytest

from distdl.job import JobSpec, JobState, Resources
from distdl.launchers.mpi import MpiLauncher
from distdl.launchers.slurm import SlurmLauncher
from tests.cluster.slurm_cluster import slurm
from tests.cluster.test_mpi import MISSING, MPIRUN
from tests.waiting import until

__all__ = ["slurm"]

pytestmark = pytest.mark.xdist_group("slurm")
VALUES = {
    "NEWLINES": "a\n\n\n\nb\n",
    "DIRECTIVE": "\r\n#SBATCH --array=0-9\r\n",
    "SHELL": "$(exit 3) `exit 4` \"'\\ \\n %s %% $HOME ~ * @env@ a,b;c",
    "UNICODE": "Grüße 日本\u2028\x85 🎉",
    "EMPTY": "",
}


def check_values(launcher, folder, **settings):
    """In place of the interpreter, a script writes down which variables a rank has."""
    probe, seen, store = folder / "probe", folder / "seen", folder / "runs/e/first"
    probe.write_text('#!/bin/sh\nenv -0 > "$SEEN.part" && mv "$SEEN.part" "$SEEN"\n')
    probe.chmod(0o755)
    bundle = store / "attempts/001/bundle"
    Path(bundle).mkdir(parents=True)
    spec = JobSpec("e/first", str(bundle), str(store), 1, Resources(), VALUES)
    made = launcher(python=str(probe), env={"SEEN": str(seen)}, **settings)
    job = made.submit(made.request(spec))
    until(seen.exists)
    words = os.fsdecode(seen.read_bytes()).split("\0")[:-1]
    variables = dict(word.split("=", 1) for word in words)
    assert {name: variables[name] for name in VALUES} == VALUES
    assert job.wait() is JobState.SUCCEEDED


def test_sbatch(slurm, tmp_path, monkeypatch):
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.env[name])
    check_values(SlurmLauncher, tmp_path, poll_seconds=0.5)


@pytest.mark.skipif(bool(MISSING), reason="apt-get install openmpi-bin mpich")
@pytest.mark.parametrize("mpirun", MPIRUN.values(), ids=MPIRUN)
def test_mpirun(mpirun, tmp_path):
    check_values(MpiLauncher, tmp_path, mpirun=mpirun)
