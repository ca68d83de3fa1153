"""Runs on a real Slurm cluster of two nodes: the same losses, requeues, cancels, arrays.

The cluster, a munged, a slurmctld and two slurmd, lives in a folder of its own, under the account
that runs the tests, and touches nothing of the system: own munge key and socket, own ports, own
slurm.conf. The nodes are called n1 and n2, names that no resolver knows, as on some clouds.
"""

import getpass
import hashlib
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import tempfile
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from distdl.launch import jobs
from distdl.launchers.slurm import commands
from distdl.launchers.slurm.slurm_job import SlurmJob
from distdl.runs.directory import RunDirectory
from tests.conftest import TINY, UNCHECKED, distdl, last_step, losses, samples, status
from tests.waiting import until

# Daemons are in folders that an ordinary user's PATH does not have.
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
# KillWait is what a checkpoint has time for.
# config_overrides: two cores each, whatever this machine has.
CONFIG = """
ClusterName=distdl
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=20
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=20 MaxTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60
"""


class SlurmCluster:
    """A running cluster, with its configuration, state and logs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A session may itself run inside a job: none of its variables may get in here.
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.env |= {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", "-o", job)))

    def until_state(self, job: str, state: str) -> None:
        until(lambda: self.show(job)["JobState"] == state, 60)

    def requeue(self, job: str) -> None:
        """As an administrator or a preemption does it, without the two minutes of a delay that
        Slurm puts before the second start."""
        self.run("scontrol", "requeue", job)
        self.until_state(job, "PENDING")
        # Not in the same second: a node takes that for the start that it was told to kill.
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def logs(self) -> str:
        """The end of each daemon's log."""
        files = {file: file.read_text(errors="replace") for file in self.folder.glob("*.log")}
        return "\n".join(
            f"== {f.name}\n" + "\n".join(t.splitlines()[-25:]) for f, t in files.items()
        )

    def is_idle(self) -> bool:
        with suppress(AssertionError):
            states = self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T")
            return states.split() == ["idle", "idle"]
        return False

    def start(self, stack: ExitStack) -> None:
        folder = self.folder
        (folder / "state").mkdir()
        config = CONFIG.format(folder=folder, user=getpass.getuser(), ports=free_ports(3))
        (folder / "slurm.conf").write_text(config)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        # --force: a folder below /tmp, which anyone may write to, is only a warning then.
        self.daemon(stack, "munged", "munged", "--foreground", "--force", *options)
        until((folder / "munge.socket").exists, 10)
        self.daemon(stack, "slurmctld", "slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self.daemon(stack, node, "slurmd", "-D", "-N", node)
        until(self.is_idle, 30)

    def daemon(self, stack: ExitStack, name: str, *command: str) -> None:
        """Starts one that stays in the foreground, and ends it with the stack."""
        out = stack.enter_context((self.folder / f"{name}.out.log").open("w"))
        pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        # Should the tests be killed, it ends with them.
        command = ("setpriv", "--pdeathsig", "TERM", *command)
        process = stack.enter_context(subprocess.Popen(command, env=self.env, **pipes))
        stack.callback(process.terminate)


@pytest.fixture(scope="module")
def slurm():
    """The cluster, idle; at the end every process of it is gone."""
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)} (apt-get install munge slurm-wlm)")
    # A socket's path has at most 107 characters, which pytest's own folders may exceed.
    cluster = SlurmCluster(Path(tempfile.mkdtemp(prefix="distdl-slurm-")))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, cluster.folder, ignore_errors=True)
        try:
            cluster.start(stack)
        except Exception as error:
            pytest.fail(f"the cluster did not start: {error}\n{cluster.logs()}")
        yield cluster
        with suppress(Exception):
            cluster.run("scancel", "--user", getpass.getuser())
            until(lambda: not cluster.run("squeue", "-h"), 10)


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens, held together so that no two are the same."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


SLURM = (*TINY, "launcher=slurm", "trainer.devices=1", "launcher.poll_seconds=0.5")
SLURM += ("launcher.forward_env=[GLOO_SOCKET_IFNAME,OMP_NUM_THREADS]", "follow=false")
JOB = "attempts/001/job.json"
SHORT = ("data.train_samples=80", "trainer.max_epochs=2")
# Shows that a rank has a forwarded variable, by its hash.
PROBE = """
import hashlib, os
from lightning.pytorch import Callback

class Probe(Callback):
    def on_train_start(self, trainer, module):
        seen = hashlib.sha256(os.environ["CANARY"].encode()).hexdigest()
        print("saw", seen, "in", os.environ.get("SLURM_JOB_ID"), "STALE" in os.environ)
"""
# kill -9 to rank 1, by hand, or by the kernel where Slurm has no cgroups.
KILLER = """
import os
from lightning.pytorch import Callback

class Killer(Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.global_rank == 1 and os.kill(os.getpid(), 9)
"""
KEY = "Bz7Gq0Vn3Yt5Kx8Wm1Rd4Jc6Ph9Sf2Lu" * 2
SECRET = "kept-a4b5c6d7-by-the-canary"
# What a shell inside an allocation may hold; none of it may reach sbatch or the job.
STALE = {"SLURM_JOB_ID": "99999", "SLURM_NTASKS": "7", "SLURM_NTASKS_PER_NODE": "7", "STALE": "1"}
STALE |= {"SLURM_EXPORT_ENV": "NONE", "SBATCH_EXPORT": "NONE", "SBATCH_OUTPUT": "elsewhere.log"}
STALE |= {"SBATCH_NO_REQUEUE": "1", "SBATCH_TIMELIMIT": "1"}


@pytest.fixture
def submit(slurm):
    """The command line on the cluster, unchecked."""

    def submit(folder, *typed, code=0, **env):
        env |= {name: slurm.env[name] for name in ("PATH", "SLURM_CONF")}
        done = distdl(*SLURM, *typed, cwd=folder, env=env, module=UNCHECKED)
        assert done.returncode == code, done.stdout + done.stderr + slurm.logs()
        return done

    return submit


@pytest.fixture
def on_cluster(slurm, command, monkeypatch):
    """The command line on the cluster, in this process."""
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {**variables, **slurm.env}.items():
        if name in ("PATH", "SLURM_CONF", *variables):
            monkeypatch.setenv(name, value)
    return command


def log_of(run):
    return "\n".join(p.read_text() for p in (run / "attempts/001/logs").glob("slurm-*.log"))


def handle_of(run):
    return json.loads((run / JOB).read_text())["handle"].removeprefix("slurm://")


def test_two_nodes_train_as_two_processes_of_this_machine(slurm, submit, tmp_path, background):
    """From inside an allocation, with a secret by name, in a folder with a space in its name."""
    (folder := tmp_path / "my runs").mkdir()
    (folder / "probe.py").write_text(PROBE)
    (folder / "deploy").write_text(f"-----BEGIN PRIVATE KEY-----\n{KEY}\n-----END PRIVATE KEY-----")
    same = (*SHORT, "name=a", "+callbacks.probe._target_=probe.Probe", "tracking=csv")
    local = (*TINY, *same, "trainer.devices=2", "output_dir=here")
    reference = background(*local, cwd=folder, env={"CANARY": SECRET}, module=UNCHECKED)
    names = "launcher.forward_env=[GLOO_SOCKET_IFNAME,OMP_NUM_THREADS,CANARY]"
    typed = (*same, "follow=true", "trainer.num_nodes=2", "launcher.walltime=0:10:00", names)
    done = submit(folder, *typed, CANARY=SECRET, **STALE)
    assert reference.wait() == 0, reference.output()

    run, other = folder / "outputs/default/a", folder / "here/default/a"
    assert losses(run) == losses(other) and len(losses(run)) == 10
    assert (run / "config.yaml").read_bytes() == (other / "config.yaml").read_bytes()
    assert status(run)["state"] == "SUCCEEDED"
    assert "COMPLETED" in done.stdout and "launcher slurm, rank 0 at 127.0.0.1" in done.stdout
    shown = slurm.show(handle_of(run))
    facts = {"NumNodes": "2", "Requeue": "1", "TimeLimit": "00:10:00"}
    assert facts.items() <= shown.items()
    seen = hashlib.sha256(SECRET.encode()).hexdigest()
    assert f"saw {seen} in {shown['JobId']} False" in log_of(run)

    assert "left out   deploy: line 1 holds a private key\n" in done.stderr
    assert (run / "attempts/001/bundle/code/project/probe.py").exists()
    assert not (run / "attempts/001/bundle/code/project/deploy").exists()

    output = [done.stdout, done.stderr, slurm.run("scontrol", "show", "job", shown["JobId"])]
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [text for text in (*files, *map(str.encode, output)) if SECRET.encode() in text]


def test_a_job_resumes_after_requeue_and_preemption(slurm, submit, tmp_path, on_cluster):
    """Requeued by hand, preempted by a more important job, and cancelled in the end."""
    typed = ("name=b", "trainer.num_nodes=2", "trainer.max_epochs=200", "tracking=mlflow")
    submit(tmp_path, *typed)
    run = tmp_path / "outputs/default/b"
    job = handle_of(run)

    def reach(step):
        until(lambda: last_step(run) >= step, 120, lambda: log_of(run) + slurm.logs())
        return last_step(run)

    def mlflow_runs():
        address = f"file:{tmp_path}/outputs/mlflow.db?mode=ro"
        with suppress(sqlite3.Error), closing(sqlite3.connect(address, uri=True)) as database:
            return database.execute("select run_uuid from runs").fetchall()

    reach(3)
    before = until(mlflow_runs, 60)
    slurm.requeue(job)
    reach(last_step(run) + 2)
    assert status(run)["restarts"] == 1
    # The ranks end within the grace time, which Slurm by itself takes for the end of the job.
    slurm.run("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    slurm.until_state(job, "PENDING")
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    second = last_step(run)
    reach(second + 2)
    assert status(run)["restarts"] == 2
    assert "RUNNING, restarted 2 times" in on_cluster("jobs", "status", str(run)).out

    assert on_cluster("jobs", "cancel", str(run)).code == 0
    ended = on_cluster("jobs", "wait", str(run))
    assert (ended.code, ended.out.split()) == (130, ["CANCELLED", f"slurm://{job}"])
    log = log_of(run)
    assert f"slurm job {job}, start 3, on n[1-2]" in log
    assert log.count("goes back to the queue") == 1
    # Every step was trained once: each start resumed exactly where the one before had ended.
    steps = [step for _, step in samples(run)[1]]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > second
    assert list((run / "checkpoints").glob("*.manifest.json"))
    assert mlflow_runs() == before and len(before) == 1


def test_a_killed_rank_is_named(submit, tmp_path):
    (tmp_path / "killer.py").write_text(KILLER)
    killer = "+callbacks.killer._target_=killer.Killer"
    typed = (*SHORT, "name=k", "trainer.num_nodes=2", "follow=true", killer)
    done = submit(tmp_path, *typed, code=137)
    assert "rank 1 failed first: killed by SIGKILL on n2" in done.stderr
    record = status(tmp_path / "outputs/default/k")
    assert (record["state"], record["exit_code"]) == ("FAILED", 137)
    first = {"rank": 1, "host": "n2", "signal": "SIGKILL", "exit_code": 137}
    assert record["first_error"] == first
    assert record["error"].startswith("rank 1: killed by SIGKILL on n2")


GRES = "launcher.gpus: sbatch refuses it: Invalid generic resource (gres) specification"
REFUSED = {
    "launcher.partition=nosuch": "launcher.partition: sbatch refuses it: invalid partition",
    "launcher.constraint=nosuch": "launcher.constraint: sbatch refuses it: Batch job submi",
    "trainer.accelerator=gpu": GRES,
    'launcher.sbatch=["--reservation=none"]': "launcher: sbatch refuses it",
}


def test_what_slurm_refuses(slurm, tmp_path, monkeypatch, on_cluster, without_stage_2):
    """Its own words, the key they are about, exit code 2, and no job."""
    for number, (typed, message) in enumerate(REFUSED.items()):
        result = on_cluster(*SLURM, f"name=r{number}", typed)
        assert (result.code, message in result.err) == (2, True), result
        assert "Traceback" not in result.err
        assert status(tmp_path / f"outputs/default/r{number}")["state"] == "FAILED"
    assert slurm.run("squeue", "-h") == ""
    # The controller is down: nobody listens on this port.
    text = (slurm.folder / "slurm.conf").read_text()
    port = f"SlurmctldPort={free_ports(1)[0]}"
    (tmp_path / "down.conf").write_text(re.sub("SlurmctldPort=.*", port, text))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "down.conf"))
    result = on_cluster(*SLURM, "name=down")
    assert result.code == 2 and "Slurmctld(primary) at " in result.err
    assert " is DOWN\n" in result.err and not Path("outputs/default/down").exists()


def test_a_sweep_is_one_array(slurm, submit, tmp_path, on_cluster):
    typed = ("-m", "name=s", "seed=1,2", "launcher.max_parallel=2", "data.train_samples=24")
    submit(tmp_path, *typed, "trainer.max_epochs=1")
    runs = sorted((tmp_path / "outputs/default/s").iterdir())
    handles = [handle_of(run) for run in runs]
    number = handles[0].partition("_")[0]
    assert set(handles) == {f"{number}_0", f"{number}_1"}
    ended = on_cluster("jobs", "wait", "outputs/default/s")
    assert (ended.code, ended.out.count("SUCCEEDED")) == (0, 2), ended
    assert slurm.show(f"{number}_1")["ArrayTaskThrottle"] == "2"
    for run, handle in zip(runs, handles, strict=True):
        assert status(run)["state"] == "SUCCEEDED" and len(losses(run)) == 3
        assert f"run     {run.relative_to(tmp_path)}" in log_of(run)
        logs = on_cluster("jobs", "logs", f"slurm://{handle}")
        assert logs.code == 0 and logs.out.strip() == log_of(run).strip()


def test_the_list_asks_slurm_once(slurm, on_cluster, monkeypatch, tmp_path):
    job = ("sbatch", "--parsable", "--output=/dev/null", "--wrap=true")
    held, ended = slurm.run(*job, "--hold"), slurm.run(*job)
    array = slurm.run(*job, "--hold", "--array=0-1")
    slurm.until_state(ended, "COMPLETED")
    numbers = {"held": held, "task": f"{array}_1", "ended": ended, "forgotten": "99999", "cut": "1"}
    for name, number in numbers.items():
        run = RunDirectory(tmp_path / "outputs/e" / name)
        run.create("seed: 1\n", {})
        where = {"launcher": {"_target_": "distdl.launchers.slurm.SlurmLauncher"}}
        attempt = run.begin_attempt({"run_id": f"e/{name}", "where": where})
        jobs.record(attempt, SlurmJob(number))
    (attempt.path / "launch.yaml").write_text("where")
    asked, real = [], commands.run
    monkeypatch.setattr(commands, "run", lambda *w, **more: asked.append(w[0]) or real(*w, **more))

    def listed():
        asked.clear()
        rows = [line.split("\t") for line in on_cluster("jobs", "list").out.splitlines()]
        return {row[0].rpartition("/")[2]: row[2] for row in rows}

    states = {"held": "PENDING", "task": "PENDING", "forgotten": "UNKNOWN", "cut": "DAMAGED"}
    states |= {"ended": "SUCCEEDED"}
    for _ in range(2):
        assert listed() == states and asked == ["squeue", "sacct"]
    assert on_cluster("jobs", "status", "outputs/e/held").out.count("PENDING") == 1
    slurm.run("scancel", held, array)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none.conf"))
    monkeypatch.setattr(commands, "TIMEOUT", 1)  # squeue asks DNS for another one, for minutes
    gone = {"held": "UNKNOWN", "task": "UNKNOWN"}
    assert listed() == states | gone and asked == ["squeue"], "not for each of them"
