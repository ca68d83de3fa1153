"""A Slurm cluster of two nodes on this machine: a real munged, a slurmctld and two slurmd.

It lives in a folder of its own, under the account that runs the tests, and touches nothing of the
system: own munge key and socket, own ports, own slurm.conf (named by $SLURM_CONF). The nodes are
called n1 and n2, names that no resolver knows, as on some clouds.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "scontrol", "scancel", "sinfo")
# Daemons stand where an ordinary user's PATH does not look.
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [name for name in (*DAEMONS, *COMMANDS) if not shutil.which(name, path=PATH)]
# A job that has ended is known for MinJobAge seconds; KillWait is what a checkpoint has time for.
# config_overrides: two cores each, whatever this machine has.
CONFIG = """
ClusterName=distdl
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
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
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=20
MinJobAge=300
JobRequeue=1
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
    """A running cluster.

    Args:
        folder: Its configuration, state and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A session may itself run inside a job: none of its variables may get in here.
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.env |= {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """Runs one of Slurm's commands and returns what it says."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """What the controller says about a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", "-o", job)))

    def until_state(self, job: str, *states: str, timeout: float = 60) -> str:
        return until(
            lambda: next((s for s in states if self.show(job)["JobState"] == s), ""), timeout
        )

    def requeue(self, job: str) -> None:
        """As an administrator or a preemption does it, without the two minutes of a delay that
        Slurm puts before the second start."""
        self.run("scontrol", "requeue", job)
        self.until_state(job, "PENDING")
        # Not in the same second: a node takes that for the start that it was told to kill.
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def logs(self) -> str:
        """The end of each daemon's log."""
        texts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-25:]
            texts.append("\n".join([f"== {path.name}", *lines]))
        return "\n".join(texts)


def until(condition: Callable[[], str], timeout: float = 60) -> str:
    """Waits for a text that is not empty, and returns it."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """The cluster, idle; at the end every process of it is gone."""
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)} (apt-get install munge slurm-wlm)")
    # A socket's path has at most 107 characters, which pytest's own folders may exceed.
    folder = Path(tempfile.mkdtemp(prefix="distdl-slurm-"))
    cluster = SlurmCluster(folder)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            start(cluster, stack)
        except Exception as error:
            pytest.fail(f"the cluster did not start: {error}\n{cluster.logs()}")
        yield cluster
        with suppress(Exception):
            cluster.run("scancel", "--user", getpass.getuser())
            until(lambda: "" if cluster.run("squeue", "-h") else "none", 10)


def start(cluster: SlurmCluster, stack: ExitStack) -> None:
    folder, user = cluster.folder, getpass.getuser()
    (folder / "state").mkdir()
    config = CONFIG.format(folder=folder, user=user, ports=free_ports(3))
    (folder / "slurm.conf").write_text(config)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
    files |= {"log-file": "munged.log", "seed-file": "munge.seed"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    # --force: a folder below /tmp, which anyone may write to, is only a warning then.
    daemon(cluster, stack, "munged", "munged", "--foreground", "--force", *options)
    until(lambda: "up" if (folder / "munge.socket").exists() else "", 10)
    daemon(cluster, stack, "slurmctld", "slurmctld", "-D", "-c")
    for node in ("n1", "n2"):
        daemon(cluster, stack, node, "slurmd", "-D", "-N", node)

    def idle() -> str:
        with suppress(AssertionError):
            states = cluster.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split()
            return "up" if states == ["idle", "idle"] else ""
        return ""

    until(idle, 30)


def daemon(cluster: SlurmCluster, stack: ExitStack, name: str, *command: str) -> None:
    """Starts one that stays in the foreground, and ends it with the stack."""
    out = stack.enter_context((cluster.folder / f"{name}.out.log").open("w"))
    # Should the tests be killed, it goes with them.
    process = subprocess.Popen(
        ("setpriv", "--pdeathsig", "TERM", *command),
        env=cluster.env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
    )

    def stop() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(stop)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, held together so that no two are the same."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
