"""How an attempt ends early: by a signal all ranks end at the same step, saved; the rank that
fails or is killed is named."""

import json
import os
import random
import signal
import time

import psutil
import pytest

from distdl.util.exit_codes import EXIT_PREEMPTED
from tests.conftest import TINY, UNCHECKED, distdl, last_step, losses, samples, status, trained
from tests.waiting import until

MATRIX = bool(os.environ.get("DISTDL_MATRIX"))
TWO = ("data.batch_size=4", "trainer.devices=2", "strategy=ddp", "trainer.max_epochs=2", "name=s")
RUN = "outputs/default/s"


def processes(parent):
    return [psutil.Process(parent), *psutil.Process(parent).children(recursive=True)]


def worker(parent, rank):
    """The pid of a rank below `parent`."""
    workers = [each for each in processes(parent) if "distdl.worker" in each.cmdline()]
    return next(each.pid for each in workers if each.environ().get("RANK") == str(rank))


def listening(parent):
    """The addresses at which a command's processes can be reached."""
    sockets = [each for process in processes(parent) for each in process.net_connections("inet")]
    return {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}


def reached(moment, job, run):
    if moment == "validation":
        return last_step(run) >= 20 and "step 20 " in job.output()
    if moment == "step 5":
        return last_step(run) >= 5
    return status(run).get("state") == moment


# What is signalled -> overrides, the signal, when.
CASES = {
    "rank 1": (TWO, signal.SIGTERM, "step 5"),
    "the command": ((*TWO, "data.val_samples=400"), signal.SIGUSR1, "validation"),
    # As Slurm and `timeout` do it: the loaders' workers get it too, and must not die first.
    "every process": (("data.num_workers=2", "name=s"), signal.SIGTERM, "step 5"),
    "before there are ranks": (TWO, signal.SIGUSR1, "PENDING"),
    "before they train": ((*TWO, "data.train_samples=40"), signal.SIGTERM, "RUNNING"),
}
FEW = ["rank 1", "every process", "before there are ranks"]


@pytest.mark.parametrize("case", CASES if MATRIX else FEW)
def test_a_signal_ends_all_ranks_at_a_saved_step(case, background, tmp_path):
    overrides, number, moment = CASES[case]
    run = tmp_path / RUN
    unset = {"GLOO_SOCKET_IFNAME": ""}
    job = background(*TINY, *overrides, cwd=tmp_path, module=UNCHECKED, env=unset)
    job.until(lambda: reached(moment, job, run))
    if moment == "step 5":
        assert listening(job.process.pid) == ({"127.0.0.1"} if overrides == TWO else set())
    if case == "every process":
        os.killpg(job.process.pid, number)
    else:
        os.kill(worker(job.process.pid, 1) if case == "rank 1" else job.process.pid, number)
    assert job.wait() == EXIT_PREEMPTED, job.output()
    record = status(run)
    assert (record["state"], record["exit_code"]) == ("PREEMPTED", EXIT_PREEMPTED)
    assert "Traceback" not in job.output()
    if moment == "RUNNING":
        trained(*overrides, "trainer.devices=1", cwd=tmp_path)
        assert status(run, 2)["state"] == "SUCCEEDED"
    if case.startswith("before"):
        return
    manifest = json.loads((run / "checkpoints/last.ckpt.manifest.json").read_text())
    step = manifest["step"]
    assert manifest["reason"] == "signal"
    assert "python -m distdl resume" in job.output()
    rows = [path.read_text().splitlines() for path in (run / "logs").glob("samples-rank*.csv")]
    assert {int(lines[-1].split(",")[2]) for lines in rows} == {step}
    if moment == "validation":  # it starts again from its first batch, then the next epoch follows
        done = distdl("resume", str(run), cwd=tmp_path, module=UNCHECKED)
        assert done.returncode == 0, done.stdout + done.stderr
        assert min(step for _, step in samples(run)[2]) == step + 1 == 21
        assert sorted(losses(run)) == list(range(1, 41))
        assert done.stderr.count("val/acc1") == 2
        assert status(run, 2)["metrics"]["val/samples"] == 400


# An interpreter looks for this by itself: the rank ends with the first import of torch.
AT_IMPORT = """
import os, sys
if (os.environ.get("RANK"), os.environ.get("END")) == ("1", "import"):
    sys.addaudithook(
        lambda event, args: event == "import" and args[0] == "torch" and os.kill(os.getpid(), 9)
    )
"""
AT_HOOK = """
import os
from lightning.pytorch import Callback
from distdl.util.errors import UserError

class Ends(Callback):
    def on_train_start(self, trainer, module):
        self.moment = os.environ["END"] if trainer.global_rank == 1 else ""

    def on_train_batch_end(self, trainer, *_):
        if self.moment == "training":
            raise UserError.at("data.root", "bad weather")

    def on_train_end(self, *_): self.moment == "end" and os.kill(os.getpid(), 9)
    def teardown(self, *_, stage): self.moment == "teardown" and os.kill(os.getpid(), 9)
"""
SHORT = ("data.train_samples=16", "data.val_samples=8", "data.batch_size=2", "trainer.max_epochs=1")
MOMENTS = ["import", "training", "end", "teardown"]


@pytest.mark.parametrize("moment", MOMENTS if MATRIX else [])
def test_a_rank_that_ends_is_named(moment, tmp_path):
    """Refused in the training, otherwise kill -9: torchrun swallows exit codes and messages."""
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    (tmp_path / "ends.py").write_text(AT_HOOK)
    words = (*TINY, *TWO, *SHORT, "+callbacks.ends._target_=ends.Ends")
    env = {"END": moment, "PYTHONPATH": str(tmp_path)}
    done = distdl(*words, cwd=tmp_path, env=env, module=UNCHECKED)
    code = 137
    kind = "Killed"
    message = "killed by SIGKILL on "
    if moment == "training":
        code = 2
        kind = "UserError"
        message = "data.root: bad weather"
        # This is all that is shown; the other rank lost its connection by it.
        assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == code, done.stdout + done.stderr
    assert f"rank 1 failed first: {message}" in done.stderr
    record = status(tmp_path / RUN)
    assert (record["state"], record["exit_code"]) == ("FAILED", code)
    assert record["error"].startswith(f"rank 1: {message}")
    signals = (record["first_error"].get("signal"), record["first_error"]["rank"])
    assert signals == ("SIGKILL" if kind == "Killed" else None, 1)
    error = json.loads((tmp_path / RUN / "attempts/001/errors/rank_1.json").read_text())
    assert error["type"] == kind


@pytest.mark.skipif(not MATRIX, reason="DISTDL_MATRIX is not set")
@pytest.mark.parametrize("seed", range(20))
def test_a_signal_at_any_moment_of_the_start_ends_as_preempted(seed, background, tmp_path):
    """Also between the start of a rank and the note that it has started: none outlives the job."""
    drawn = random.Random(seed)
    run = tmp_path / RUN
    job = background(*TINY, *TWO, cwd=tmp_path, module=UNCHECKED)
    job.until(lambda: status(run).get("state") == "PENDING")
    time.sleep(drawn.uniform(0, 0.5))
    started = processes(job.process.pid)
    job.process.send_signal(drawn.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]))
    assert job.wait() == EXIT_PREEMPTED, job.output()
    assert status(run)["state"] == "PREEMPTED"
    assert "Traceback" not in job.output()
    until(lambda: not any(each.is_running() for each in started), 10)
    assert status(run)["state"] == "PREEMPTED"
