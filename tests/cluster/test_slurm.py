"""Runs on a real Slurm cluster of two nodes: the same losses, requeues, cancels, arrays.

The cluster, a munged, a slurmctld and two slurmd, lives in a folder of its own, under the account
that runs the tests, and touches nothing of the system: own munge key and socket, own ports, own
slurm.conf. The nodes are called n1 and n2, names that no resolver knows, as on some clouds.
"""

import getpass
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import tempfile
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

from distdl.launchers.slurm import commands
from distdl.runs.checkpoints import CheckpointStore
from tests import slurm_spellings
from tests.cluster import witness
from tests.conftest import (
    KERNELS,
    TINY,
    UNCHECKED,
    free_port,
    last_step,
    losses,
    matrix_only,
    samples,
    status,
    trained,
)
from tests.miniature import everything
from tests.multiprocess.test_signals import COMMON, differing, make_project
from tests.waiting import until

# Daemons are in folders that an ordinary user's PATH does not have.
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
# KillWait is what a checkpoint has time for.
# config_overrides: two cores each, whatever this machine has.
CONFIG = """
ClusterName=distdl
FirstJobId={first}
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
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

    def __init__(self, folder):
        self.folder = folder
        self.daemons = []
        # A session may itself run inside a job: none of its variables may get in here.
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.env |= {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        ports = [free_port() for _ in range(3)]
        # A job's ranks meet at a port that its number gives: another suite's job on this machine
        # must not have the same.
        first = 1 + int.from_bytes(os.urandom(2)) // 4
        user = getpass.getuser()
        config = CONFIG.format(folder=folder, user=user, ports=ports, first=first)
        (folder / "slurm.conf").write_text(config)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)

    def start(self):
        files = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munge.pid",
            "log-file": "munged.log",
            "seed-file": "munge.seed",
        }
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        # --force: a folder below /tmp, which anyone may write to, is only a warning then.
        self.daemon("munged", "--foreground", "--force", *options)
        until((self.folder / "munge.socket").exists, 10, self.logs)
        self.daemon("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self.daemon("slurmd", "-D", "-N", node)
        until(self.is_idle, 30, self.logs)

    def daemon(self, *command):
        """Starts one in the foreground; should the tests be killed, it ends with them."""
        command = ("setpriv", "--pdeathsig", "TERM", *command)
        with (self.folder / "daemons.log").open("a") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.daemons.append(subprocess.Popen(command, env=self.env, **pipes))

    def close(self):
        with suppress(Exception):  # its daemons end below all the same
            self.run("scancel", "--user", getpass.getuser())
            until(lambda: not self.run("squeue", "-h"), 10)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(30)

    def run(self, *command):
        """The output of one of Slurm's commands."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def is_idle(self):
        with suppress(AssertionError):
            return self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split() == ["idle"] * 2

    def show(self, job):
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", "-o", job)))

    def start_again(self, job, when):
        """Once it is pending, and not after Slurm's two minutes."""
        until(lambda: self.show(job)["JobState"] == "PENDING", 60)
        self.run("scontrol", "update", f"JobId={job}", f"StartTime={when}")

    def logs(self):
        """The end of each daemon's log."""
        return "\n".join(f.read_text(errors="replace")[-2500:] for f in self.folder.glob("*.log"))


@pytest.fixture(scope="module")
def slurm():
    """The cluster, idle; at the end every process of it is gone."""
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)} (apt-get install munge slurm-wlm)")
    # A socket's path has at most 107 characters, which pytest's own folders may exceed.
    with (
        tempfile.TemporaryDirectory(prefix="distdl-slurm-", ignore_cleanup_errors=True) as folder,
        closing(SlurmCluster(Path(folder))) as cluster,
    ):
        cluster.start()
        yield cluster


SLURM = (
    *TINY,
    "launcher=slurm",
    "trainer.devices=1",
    "launcher.poll_seconds=0.5",
    "launcher.forward_env=[GLOO_SOCKET_IFNAME,OMP_NUM_THREADS]",
    "follow=false",
)
SHORT = ("data.train_samples=80", "trainer.max_epochs=2")
WITNESS = "+callbacks.witness._target_=witness.Witness"
SECRET = "kept-a4b5c6d7-by-the-canary"
# What a shell inside an allocation may hold; none of it may reach sbatch or the job.
STALE = {
    "SLURM_JOB_ID": "99999",
    "SLURM_NTASKS": "7",
    "SLURM_NTASKS_PER_NODE": "7",
    "STALE": "1",
    "SLURM_EXPORT_ENV": "NONE",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_OUTPUT": "elsewhere.log",
    "SBATCH_NO_REQUEUE": "1",
    "SBATCH_TIMELIMIT": "1",
}


@pytest.fixture
def on_cluster(slurm, command, without_stage_2, monkeypatch):
    """The command line on the cluster, in this process and unchecked."""
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    variables |= {name: slurm.env[name] for name in ("PATH", "SLURM_CONF")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def run(*typed, code=0):
        said = command(*typed)
        assert said.code == code, f"{said}\n{slurm.logs()}"
        return said

    return run


def log_of(run):
    return "\n".join(p.read_text() for p in (run / "attempts/001/logs").glob("slurm-*.log"))


def handle_of(run):
    handle = json.loads((run / "attempts/001/job.json").read_text())["handle"]
    return handle.removeprefix("slurm://")


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_two_nodes_train_as_two_processes_of_this_machine(slurm, on_cluster, tmp_path, monkeypatch):
    """From inside an allocation, with a secret by name, in a folder with a space in its name."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    shutil.copy(witness.__file__, folder)
    monkeypatch.chdir(folder)
    same = (*SHORT, "name=a", WITNESS, "tracking=csv")
    trained(*same, "trainer.devices=2", "output_dir=here", cwd=folder)
    for name, value in {**STALE, "CANARY": SECRET}.items():
        monkeypatch.setenv(name, value)
    forwarded = ["GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "CANARY", *KERNELS]
    names = f"launcher.forward_env=[{','.join(forwarded)}]"
    typed = (*same, "follow=true", "trainer.num_nodes=2", "launcher.walltime=0:10:00", names)
    said = on_cluster(*SLURM, *typed)

    run, other = folder / "outputs/default/a", folder / "here/default/a"
    assert losses(run) == losses(other)
    assert len(losses(run)) == 10
    assert (run / "config.yaml").read_bytes() == (other / "config.yaml").read_bytes()
    assert status(run)["state"] == "SUCCEEDED"
    assert "COMPLETED" in said.out
    assert "launcher slurm, rank 0 at 127.0.0.1" in said.out
    shown = slurm.show(handle_of(run))
    assert {"NumNodes": "2", "Requeue": "1", "TimeLimit": "00:10:00"}.items() <= shown.items()
    rank = witness.seen(log_of(run))[0]
    assert (rank["secret"], rank["stale"]) == (witness.digest(SECRET), False)

    output = [said.out, said.err, slurm.run("scontrol", "show", "job", shown["JobId"])]
    files = [*everything(folder).values(), *map(str.encode, output)]
    assert not [text for text in files if SECRET.encode() in text]


def by_hand(slurm, job):
    slurm.run("scontrol", "requeue", job)
    # Not in the same second: a node takes that for the start that it was told to kill.
    slurm.start_again(job, "now+2")


def by_preemption(slurm, job):
    """The ranks end within the grace time, which Slurm by itself takes for the end of the job."""
    slurm.run("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    slurm.start_again(job, "now")


MATRIX = "DISTDL_MATRIX" in os.environ
REQUEUED = [by_hand, by_preemption] if MATRIX else [by_preemption]
TRACKING = "mlflow" if MATRIX else "none"  # whose import takes seconds of each start


def test_a_job_resumes_after_requeue_and_preemption(slurm, on_cluster, tmp_path):
    """Requeued by hand, preempted by a more important job, and cancelled in the end."""
    typed = (
        "name=b",
        "trainer.num_nodes=2",
        "trainer.max_epochs=200",
        f"tracking={TRACKING}",
        "data.num_workers=1",  # workers get each signal too
    )
    on_cluster(*SLURM, *typed)
    run = tmp_path / "outputs/default/b"
    job = handle_of(run)

    def reach(step):
        until(lambda: last_step(run) >= step, 120, lambda: log_of(run) + slurm.logs())
        return last_step(run)

    def mlflow_runs():
        address = f"file:{tmp_path}/outputs/mlflow.db?mode=ro"
        with suppress(sqlite3.Error), closing(sqlite3.connect(address, uri=True)) as database:
            return database.execute("select run_uuid from runs").fetchall()

    reached = reach(3)
    before = until(mlflow_runs, 60) if MATRIX else None
    for restarts, requeue in enumerate(REQUEUED, 1):
        requeue(slurm, job)
        reached = last_step(run)
        reach(reached + 2)
        assert status(run)["restarts"] == restarts
    running = f"RUNNING, restarted {len(REQUEUED)} times"
    assert running in on_cluster("jobs", "status", str(run)).out

    on_cluster("jobs", "cancel", str(run))
    ended = on_cluster("jobs", "wait", str(run), code=130)
    assert ended.out.split() == ["CANCELLED", f"slurm://{job}"]
    log = log_of(run)
    assert f"slurm job {job}, start {1 + len(REQUEUED)}, on n[1-2]" in log
    assert log.count("goes back to the queue") == 1
    # Every step was trained once: each start resumed exactly where the one before had ended.
    steps = [step for _, step in samples(run)[1]]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > reached
    assert list((run / "checkpoints").glob("*.manifest.json"))
    if MATRIX:
        assert mlflow_runs() == before
        assert len(before) == 1


class Queue(threading.Thread):
    """Counts how many jobs the cluster has at once, as long as a search is at work."""

    def __init__(self, slurm):
        super().__init__(daemon=True)
        self.slurm = slurm
        self.over = threading.Event()
        self.most = 0
        self.jobs = set()

    def run(self):
        while not self.over.wait(0.2):
            now = self.slurm.run("squeue", "-h", "-t", "PD,R,CF,S", "-o", "%i").split()
            self.jobs |= {*now}
            self.most = max(self.most, len(now))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.over.set()
        self.join()


@matrix_only
def test_a_search_has_four_jobs_at_once_prunes_and_goes_on(slurm, on_cluster, background, tmp_path):
    """Each trial is one job, killed searches or not; no more than four are queued or run; what is
    pruned is a success for Slurm, and no step is trained twice."""
    pytest.importorskip("optuna")
    space = ("optimizer.lr=range(0.01,0.085,0.01)", "--sampler", "grid", "--parallel", "4")
    words = (*SLURM, "data.train_samples=80", "data.val_samples=8", "trainer.max_epochs=4")
    typed = ("tune", *words, "name=t", "--pruner", "asha", "--metric", "val/loss:min", "--json")
    study = tmp_path / "outputs/default/t"
    with Queue(slurm) as queue:
        job = background(*typed, *space, cwd=tmp_path, module=UNCHECKED)
        job.until(lambda: len([*study.glob("*/attempts/001/job.json")]) >= 5)
        job.process.kill()  # while jobs are under way
        job.process.wait()
        under_way = slurm.run("squeue", "-h", "-o", "%i").split()
        said = on_cluster(*typed, *space)
    found = json.loads(said.out.splitlines()[-1])["answer"]
    assert under_way, "what the second command has to follow"
    ends = [each["end"] for each in found["trials"]]
    assert {*ends} == {"COMPLETE", "PRUNED"}
    assert [each["number"] for each in found["trials"]] == [*range(8)]
    runs = [tmp_path / each["run"] for each in found["trials"]]
    handles = {handle_of(run) for run in runs}
    assert len(handles) == 8
    assert queue.jobs == handles, "every job that the cluster has seen is a trial's only one"
    assert queue.most == 4
    listed = on_cluster("jobs", "list").out
    for run, end in zip(runs, ends, strict=True):
        (attempt,) = samples(run).values()  # epoch and step, each once
        assert [step for _, step in attempt] == [*range(1, len(attempt) + 1)]
        recorded = status(run)
        state = "PRUNED" if end == "PRUNED" else "SUCCEEDED"
        assert (recorded["state"], recorded["exit_code"]) == (state, 0)
        assert slurm.show(handle_of(run))["JobState"] == "COMPLETED"
        assert state in next(line for line in listed.splitlines() if run.name in line)
        assert (len(attempt) < 40) == (end == "PRUNED")


@matrix_only
def test_a_killed_rank_is_named(on_cluster, tmp_path):
    shutil.copy(witness.__file__, tmp_path)
    killed = ("launcher.env={KILLED_RANK: 1}", WITNESS, "follow=true", "name=k")
    said = on_cluster(*SLURM, *SHORT, *killed, "trainer.num_nodes=2", code=137)
    assert "rank 1 failed first: killed by SIGKILL on n2" in said.err
    record = status(tmp_path / "outputs/default/k")
    assert (record["state"], record["exit_code"]) == ("FAILED", 137)
    first = {"rank": 1, "host": "n2", "signal": "SIGKILL", "exit_code": 137}
    assert record["first_error"] == first


@pytest.mark.timeout(1800)
@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_five_of_five_are_requeued(slurm, on_cluster, tmp_path, capsys):
    """A user's own module and loader, preempted at any step, complete as if nobody had."""
    make_project(tmp_path)
    size = (
        "launcher=slurm",
        "trainer.devices=1",
        "trainer.num_nodes=2",
        "follow=false",
        "launcher.forward_env=[GLOO_SOCKET_IFNAME,OMP_NUM_THREADS]",
        "data.pause=0.02",
    )
    seed = int(os.environ.get("DISTDL_SEED", 33))
    draw = random.Random(seed)
    ends = []
    rows = []

    def train(name):
        on_cluster(*COMMON, *size, f"name={name}")
        return tmp_path / "outputs/e" / name

    def ended(run):
        until(lambda: status(run).get("state") == "SUCCEEDED", 120, lambda: log_of(run))
        newest = CheckpointStore(run / "checkpoints").newest()
        ends.append(torch.load(newest, weights_only=True))

    def steps():
        file = tmp_path / "steps-0"
        return file.read_text().split() if file.exists() else []

    ended(train("whole"))
    for number in range(5):
        (tmp_path / "steps-0").unlink()
        run = train(f"p{number}")
        step = draw.randint(2, 50)
        job = handle_of(run)
        until(lambda step=step: str(step) in steps(), 120, lambda run=run: log_of(run))
        wrap = ("--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
        slurm.run("sbatch", "-p", "high", "-N2", *wrap)
        slurm.start_again(job, "now")
        saved = json.loads((run / "checkpoints/last.ckpt.manifest.json").read_text())
        last = int(steps()[-1])
        ended(run)
        wrong = differing(ends[-1], ends[0])
        rows.append((step, last, saved["step"], saved["reason"], wrong))
    with capsys.disabled():
        print(f"\nslurm, preempted at step, last step, saved, why, what differs (seed {seed})")
        print(*rows, sep="\n")
    assert all(last == saved and not wrong for _, last, saved, _, wrong in rows)


GRES = "launcher.gpus: sbatch refuses it: Invalid generic resource (gres) specification"
REFUSED = {
    "launcher.partition=nosuch": "launcher.partition: sbatch refuses it: invalid partition",
    "trainer.accelerator=gpu": GRES,
    'launcher.sbatch=["--reservation=none"]': "launcher.sbatch: sbatch refuses it",
}


def test_what_slurm_refuses(slurm, tmp_path, monkeypatch, on_cluster):
    """Its own words, the key they are about, exit code 2, and no job."""
    for number, (typed, message) in enumerate(REFUSED.items()):
        shown = on_cluster(*SLURM, f"name=r{number}", typed, code=2).err
        assert message in shown, shown
        assert "Traceback" not in shown, shown
        assert status(tmp_path / f"outputs/default/r{number}")["state"] == "FAILED"
    assert slurm.run("squeue", "-h") == ""
    # The controller is down: nobody listens on this port.
    text = (slurm.folder / "slurm.conf").read_text()
    port = f"SlurmctldPort={free_port()}"
    (tmp_path / "down.conf").write_text(re.sub("SlurmctldPort=.*", port, text))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "down.conf"))
    shown = on_cluster(*SLURM, "name=down", code=2).err
    assert "Slurmctld(primary) at " in shown
    assert " is DOWN" in shown
    assert not Path("outputs/default/down").exists()


@matrix_only
def test_sbatch_reads_the_spellings_as_listed(slurm, tmp_path):
    """With -v it names what was set. The unit tests check what the launcher makes of the list."""
    listed = slurm_spellings.RESERVED | slurm_spellings.OTHERS
    for spelling, name in listed.items():
        script = f"#!/bin/bash\n#SBATCH --time=10\n#SBATCH {spelling}\nsleep 1\n"
        (tmp_path / "job.sh").write_text(script)
        command = ["sbatch", "-v", "--test-only", str(tmp_path / "job.sh")]
        done = subprocess.run(command, env=slurm.env, capture_output=True, text=True, timeout=30)
        assert f"sbatch: {name} " in done.stderr, f"{spelling}: {done.stderr}"
        if spelling in slurm_spellings.OTHERS:
            assert done.returncode == 0, f"{spelling}: {done.stderr}"


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_a_sweep_is_one_array(slurm, on_cluster, tmp_path, monkeypatch):
    typed = ("-m", "name=s", "seed=1,2", "launcher.max_parallel=2", "data.train_samples=24")
    on_cluster(*SLURM, *typed, "trainer.max_epochs=1")
    runs = sorted((tmp_path / "outputs/default/s").glob("*/"))
    handles = [handle_of(run) for run in runs]
    number = handles[0].partition("_")[0]
    assert set(handles) == {f"{number}_0", f"{number}_1"}
    assert slurm.show(f"{number}_1")["ArrayTaskThrottle"] == "2"
    # The list asks Slurm once for all, and once if it does not answer.
    asked = []
    real = commands.run

    def noted(*words, **options):
        asked.append(words[0])
        return real(*words, **options)

    monkeypatch.setattr(commands, "run", noted)
    assert "UNKNOWN" not in on_cluster("jobs", "list").out
    assert asked == ["squeue"]
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(tmp_path / "none.conf"))
        # Without its file squeue asks DNS for a server of files, for minutes.
        patch.setattr(commands, "TIMEOUT", 1)
        assert on_cluster("jobs", "list").out.count("UNKNOWN") == 2
        assert asked == ["squeue"] * 2
    assert on_cluster("jobs", "wait", "outputs/default/s").out.count("SUCCEEDED") == 2
    for run, handle in zip(runs, handles, strict=True):
        assert status(run)["state"] == "SUCCEEDED"
        assert len(losses(run)) == 3
        assert f"run     {run.relative_to(tmp_path)}" in log_of(run)
        logs = on_cluster("jobs", "logs", f"slurm://{handle}").out
        assert logs.strip() == log_of(run).strip()
