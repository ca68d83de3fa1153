"""A host vanishes from a training under launcher=mpi: the run goes on with the other one, at the
same global batch, and uses both again once they answer: during the run, and when it is resumed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.cluster.hosts import Hosts, why_not
from tests.conftest import DISTDL, TINY, environment, last_step, losses, samples, status
from tests.waiting import until

pytestmark = [
    pytest.mark.xdist_group("mpi"),
    pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.skipif(
        shutil.which("mpirun.openmpi") is None, reason="apt-get install openmpi-bin"
    ),
]
# The first attempt waits at step 4 until its host is cut off. If there is a file `slow`, the second
# attempt takes its time until there is a third one.
MODEL = """
import time
from pathlib import Path
from distdl.models import ImageClassifier

class Waiting(ImageClassifier):
    def on_train_batch_start(self, batch, batch_idx):
        attempts = Path("outputs/default/r/attempts")
        while self.global_step == 4 and not (attempts / "002").exists():
            time.sleep(0.05)
        if self.global_step > 4 and Path("slow").exists() and not (attempts / "003").exists():
            time.sleep(0.2)
"""
# `python -m distdl`, but it looks for lost hosts each second.
LOOKING = (
    "-c",
    "import sys; from distdl.cli import main as command_line; from distdl.launch import left_out\n"
    "left_out.LOOK_S = 1.0; sys.argv[0] = command_line.__file__; sys.exit(command_line.main())",
)
RUN = (
    *TINY,
    "model._target_=mine.Waiting",
    "name=r",
    "launcher=mpi",
    "launcher.max_attempts=1",
    "launcher.mpirun=mpirun.openmpi",
    "launcher.hosts=[node1,node2]",
    "trainer.num_nodes=2",
    "trainer.devices=1",
    "trainer.max_epochs=1",
    "checkpoint.every_n_steps=2",
    "data.train_samples=96",
    "data.val_samples=16",
    "data.batch_size=8",
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts("node1", "node2") as both:
        yield both


def test_a_lost_host_is_left_out_until_it_answers(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / ".gitignore").write_text("outputs\n")
    run = tmp_path / "outputs/default/r"
    command = [sys.executable, *DISTDL, *RUN, f"launcher.ssh={hosts.ssh}"]
    with (tmp_path / "output").open("w+") as log:
        job = hosts.popen("node1", command, tmp_path, environment(), stdout=log, stderr=log)
        output = (tmp_path / "output").read_text
        until(lambda: last_step(run) >= 4 or job.poll() is not None, 240, output)
        hosts.cut("node2")
        job.wait(240)
    assert job.returncode == 0, output()
    assert "left out: node2" in output()
    assert status(run, 2)["state"] == "SUCCEEDED"
    first, second = (launch(run, number) for number in (1, 2))
    assert second.left_out.hosts == ["node2"]
    assert second.resources.num_nodes == 1
    assert second.global_batch_size == first.global_batch_size == 16
    assert sorted(losses(run)) == [1, 2, 3, 4, 5, 6]
    steps = {**samples(run)[1], **samples(run)[2]}
    assert sorted(each for ids in steps.values() for each in ids) == list(range(96))

    hosts.mend("node2")
    again = [
        sys.executable,
        *DISTDL,
        "resume",
        str(run),
        "trainer.max_epochs=2",
        "launcher.mpirun=mpirun.openmpi",
        f"launcher.ssh={hosts.ssh}",
    ]
    done = hosts.run("node1", again, tmp_path, environment(), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = launch(run, 3)
    assert whole.resources.num_nodes == 2
    assert "left_out" not in whole
    assert whole.global_batch_size == 16
    assert len(losses(run)) == 12


def test_it_grows_back_during_the_run(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / ".gitignore").write_text("outputs\n")
    (tmp_path / "slow").touch()
    run = tmp_path / "outputs/default/r"
    command = [sys.executable, *LOOKING, *RUN, "trainer.max_epochs=10"]
    with (tmp_path / "output").open("w+") as log:
        words = [*command, f"launcher.ssh={hosts.ssh}"]
        job = hosts.popen("node1", words, tmp_path, environment(), stdout=log, stderr=log)
        output = (tmp_path / "output").read_text
        until(lambda: last_step(run) >= 4 or job.poll() is not None, 240, output)
        hosts.cut("node2")
        until(lambda: last_step(run, 2) >= 6 or job.poll() is not None, 120, output)
        hosts.mend("node2")
        job.wait(240)
    assert job.returncode == 0, output()
    assert "2 hosts answer: saving, to go on with them" in output()
    sizes = [launch(run, number).resources.num_nodes for number in (1, 2, 3)]
    assert sizes == [2, 1, 2]
    assert not (run / "attempts/004").exists()
    # No step is lost or done twice: the second attempt saved before it ended.
    second, third = samples(run)[2], samples(run)[3]
    assert not second.keys() & third.keys()
    last = {**samples(run)[1], **second, **third}
    assert sorted(each for ids in last.values() for each in ids) == sorted([*range(96)] * 10)


def launch(run: Path, number: int):
    return OmegaConf.load(run / f"attempts/{number:03d}/launch.yaml")
