"""How an attempt ends early: by a signal all ranks end at the same step, saved; the rank that
fails or is killed is named."""

import json
import os
import signal

import psutil
import pytest

from distdl.job import EXIT_PREEMPTED
from tests.conftest import TINY, UNCHECKED, distdl, last_step, losses, samples, status, trained

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
    return last_step(run) >= 5 if moment == "step 5" else status(run).get("state") == moment


# What is signalled -> overrides, the signal, when.
CASES = {
    "rank 1": (TWO, signal.SIGTERM, "step 5"),
    "the command": ((*TWO, "data.val_samples=400"), signal.SIGUSR1, "validation"),
    # As Slurm and `timeout` do it: the loaders' workers get it too, and must not die first.
    "every process": (("data.num_workers=2", "name=s"), signal.SIGTERM, "step 5"),
    "before there are ranks": (TWO, signal.SIGUSR1, "PENDING"),
    "before they train": ((*TWO, "data.train_samples=40"), signal.SIGTERM, "RUNNING"),
}


@pytest.mark.parametrize("case", CASES if MATRIX else [*CASES][:4])
def test_a_signal_ends_all_ranks_at_a_saved_step(case, background, tmp_path):
    overrides, number, moment = CASES[case]
    run, unset = tmp_path / RUN, {"GLOO_SOCKET_IFNAME": ""}
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
    assert manifest["reason"] == "signal" and "python -m distdl resume" in job.output()
    rows = [path.read_text().splitlines() for path in (run / "logs").glob("samples-rank*.csv")]
    assert {int(lines[-1].split(",")[2]) for lines in rows} == {step}
    if moment == "validation":  # it starts again from its first batch, then the next epoch follows
        done = distdl("resume", str(run), cwd=tmp_path, module=UNCHECKED)
        assert done.returncode == 0, done.stdout + done.stderr
        assert min(step for _, step in samples(run)[2]) == step + 1 == 21
        assert sorted(losses(run)) == list(range(1, 41))
        assert done.stderr.count("val/acc1") == 2
        assert status(run, 2)["metrics"]["val/samples"] == 400


# An interpreter looks for this by itself: the rank ends with the first import of a module.
AT_IMPORT = """
import os, sys
rank, how, moment = os.environ.get("END", "- - -").split()
if os.environ.get("RANK") == rank:
    sys.addaudithook(
        lambda event, args: event == "import" and args[0] == moment and os.kill(os.getpid(), 9)
    )
"""
AT_HOOK = """
import os
from lightning.pytorch import Callback
from distdl.util.errors import UserError

rank, how, moment = os.environ["END"].split()

def end(name):
    if (os.environ["RANK"], name) != (rank, moment):
        return
    if how == "kill":
        os.kill(os.getpid(), 9)
    raise UserError.at("data.root", "bad weather") if how == "refuse" else ValueError("bad weather")

class Ends(Callback):
    def on_train_batch_end(self, trainer, *_): trainer.global_step == 2 and end("training")
    def on_save_checkpoint(self, *_): end("checkpoint")
    def on_train_end(self, *_): end("end")
    def teardown(self, *_, stage): end("teardown")
"""
SHORT = ("data.train_samples=16", "data.val_samples=8", "data.batch_size=2", "trainer.max_epochs=1")
ENDS = ["1 kill torch", "1 refuse training", "1 raise training", "0 kill checkpoint"]
ENDS += ["1 kill end", "1 kill teardown"]
# What the rank did -> the exit code, the kind of the error, and its message.
ENDED = {
    "raise": (1, "ValueError", "ValueError: bad weather"),
    "refuse": (2, "UserError", "data.root: bad weather"),
    "kill": (137, "Killed", "killed by SIGKILL on "),
}


@pytest.mark.parametrize("end", ENDS if MATRIX else ENDS[:2])
def test_a_rank_that_ends_is_named(end, tmp_path):
    """kill -9 at any moment, or an exception: torchrun swallows exit codes and messages."""
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    (tmp_path / "ends.py").write_text(AT_HOOK)
    words = (*TINY, *TWO, *SHORT, "+callbacks.ends._target_=ends.Ends")
    env = {"END": end, "PYTHONPATH": str(tmp_path)}
    done = distdl(*words, cwd=tmp_path, env=env, module=UNCHECKED)
    rank, how, _ = end.split()
    code, kind, message = ENDED[how]
    assert done.returncode == code, done.stdout + done.stderr
    assert f"rank {rank} failed first: {message}" in done.stderr
    record = status(tmp_path / RUN)
    assert (record["state"], record["exit_code"]) == ("FAILED", code)
    assert record["error"].startswith(f"rank {rank}: {message}")
    first, number = record["first_error"], "SIGKILL" if how == "kill" else None
    assert (first["rank"], first.get("signal")) == (int(rank), number)
    attempt = tmp_path / RUN / "attempts/001"
    assert json.loads((attempt / f"errors/rank_{rank}.json").read_text())["type"] == kind
    if how == "refuse":  # is all that is shown; the other rank lost its connection by it
        assert "Traceback" not in done.stdout + done.stderr
        assert "Traceback" in (attempt / "logs/rank_0.log").read_text()
