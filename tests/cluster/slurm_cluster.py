"""A Slurm cluster of two nodes on this machine: a real munged, a slurmctld and two slurmd.

It lives in a folder of its own, under the account that runs the tests, and touches nothing of the
system: own munge key and socket, own ports, own slurm.conf (named by $SLURM_CONF). The nodes are
called n1 and n2, names that no resolver knows, as on some clouds.
"""

import getpass
import os
import re
import shutil
import socket
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

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


@pytest.fixture(scope="session")
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
