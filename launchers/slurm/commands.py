"""Slurm's own commands: sbatch, scontrol, sacct, scancel."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distdl.launchers.common import Forgotten
from distdl.launchers.slurm.slurm_settings import SlurmSettings
from distdl.util.errors import UserError

TIMEOUT = 60  # seconds; a command waits for an absent controller for 10 to 20
# Of the shell's variables, what a batch script and srun need to find their way.
NEEDED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR")
# How Slurm's commands find their cluster.
CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER")
# A user's defaults, for what the launcher's settings leave open: sbatch prefers a variable
# to a line of the script.
DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_TIMELIMIT": "walltime",
    "SBATCH_RESERVATION": "",
}
# Words of sbatch's refusal -> which setting it is about, and what to do.
REFUSALS = {
    "partition": ("launcher.partition", "sinfo -s lists the partitions"),
    "account": ("launcher.account", "sacctmgr show associations user=$USER lists yours"),
    "qos": ("launcher.qos", "sacctmgr show qos lists them"),
    "time limit": ("launcher.walltime", "sinfo -s shows the limit of each partition"),
    "feature": ("launcher.constraint", "sinfo -o '%N %f' lists the features of the nodes"),
    "gres": ("launcher.gpus", "sinfo -o '%N %G' lists the GPUs; launcher.gpus=gres or none"),
    "memory": ("launcher.mem", "sinfo -o '%N %m' lists the megabytes of the nodes"),
    "node count": ("trainer.num_nodes", "sinfo -s shows how many there are"),
    "node configuration": (
        "trainer.num_nodes",
        "no such nodes: see trainer.devices, launcher.cpus_per_task, mem and gpus",
    ),
    "array": ("launcher", "scontrol show config | grep MaxArraySize shows how long one may be"),
}
# What any command prints when no controller answers.
DOWN = ("unable to contact slurm controller", "process configuration", "configuration source")


class Unreachable(UserError):
    """Slurm did not answer: its commands are not here, or its controller is down."""


def forgotten(number: str) -> Forgotten:
    """A job is known for MinJobAge seconds after its end; the accounting may know it for longer."""
    what = f"Slurm does not know job {number}, or has forgotten it (MinJobAge)"
    return Forgotten(f"{what}; its log is in the run's attempts/NNN/logs/")


@dataclass(frozen=True)
class Look:
    """How a job stands.

    Args:
        state: In Slurm's terms, `RUNNING`.
        reason: Why it waits or ended, `Resources`; empty if unknown.
        log: Where its output goes.
    """

    state: str
    reason: str = ""
    log: Path | None = None

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


def environment(
    forwarded: Iterable[str] = (), settings: SlurmSettings | None = None
) -> dict[str, str]:
    """Variables for Slurm's commands, and by sbatch for the job, which inherits them.

    Few are chosen, rather than named in `sbatch --export`: that takes SLURM_* variables of an
    allocation we may stand in, and starts a login shell on the node. What is forwarded goes by this
    way only, so that its value stands in no script and on no command line.

    Args:
        forwarded: Further names.
        settings: The launcher's; where one is set, the user's own default for it is left out.
    """
    defaults = [name for name, key in DEFAULTS.items() if getattr(settings, key, None) is None]
    names = {*NEEDED, *CLUSTER, *defaults, *forwarded}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def reach() -> None:
    """Whether there is a cluster that takes jobs.

    Raises:
        UserError: Slurm is not here, or its controller does not answer.
    """
    with from_a_login_node():
        done = run("scontrol", "ping")
        if done.returncode != 0:  # "Slurmctld(primary) at head is DOWN", one line per controller
            down = [line for line in done.stdout.splitlines() if line.endswith("DOWN")]
            raise Unreachable(" / ".join(down) or "its controller does not answer")


@contextmanager
def from_a_login_node() -> Iterator[None]:
    try:
        yield
    except Unreachable as error:
        remedy = "launcher=slurm submits from a login node of a cluster"
        raise UserError.at("launcher", str(error), remedy) from None


def submit(path: Path, forwarded: Iterable[str], settings: SlurmSettings) -> str:
    """Submits a script and returns the job's number.

    Raises:
        UserError: Slurm is not here, does not answer, or refuses the job.
    """
    with from_a_login_node():
        done = run("sbatch", "--parsable", str(path), env=environment(forwarded, settings))
    # A site's own plugin may print more around it; with several clusters ";name" follows.
    number = re.search(r"^(\d+)(;\S+)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0 and number:
        return number[1]
    errors = re.sub(r"^sbatch: (error: |fatal: )?", "", done.stderr, flags=re.MULTILINE)
    reason = " / ".join(filter(None, errors.strip().splitlines()))
    known = (about for words, about in REFUSALS.items() if words in reason.lower())
    key, remedy = next(known, ("launcher", ""))
    raise UserError.at(key, f"sbatch refuses it: {reason or 'without a reason'}", remedy)


def look(number: str) -> Look:
    """How a job stands.

    Raises:
        Forgotten: Slurm does not know it.
        Unreachable: Slurm does not answer.
    """
    done = run("scontrol", "show", "job", number)
    state = re.search(r"JobState=(\S+)", done.stdout)
    if done.returncode == 0 and state:
        reason = re.search(r"Reason=(?!None\b)(\S+)", done.stdout)
        log = re.search(r"^\s*StdOut=(.+)$", done.stdout, re.MULTILINE)
        path = Path(log[1].replace("%%", "%")) if log else None
        return Look(state[1], reason[1] if reason else "", path)
    if "invalid job id" not in done.stderr.lower():
        raise Unreachable(done.stderr.strip() or "scontrol prints nothing")
    if looks := remembered([number]):
        return looks[number]
    raise forgotten(number)


def look_at(numbers: Sequence[str]) -> dict[str, Look]:
    """How several jobs stand, asked at once; those that Slurm has forgotten are absent.

    Raises:
        Unreachable: Slurm does not answer.
    """
    looks: dict[str, Look] = {}
    for some in in_questions(numbers):
        done = run("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-j", ",".join(some))
        if done.returncode != 0 and "invalid job id" not in done.stderr.lower():
            raise Unreachable(done.stderr.strip() or "squeue prints nothing")
        for line in done.stdout.splitlines():
            number, state, reason = line.split("|", 2)
            looks[number] = Look(state, "" if reason == "None" else reason)
    return remembered([number for number in numbers if number not in looks]) | looks


def remembered(numbers: Sequence[str]) -> dict[str, Look]:
    """What the accounting knows of jobs that the controller has forgotten (MinJobAge, 5 minutes);
    empty where no accounting is kept. Source: https://slurm.schedmd.com/sacct.html"""
    looks = {}
    for some in in_questions(numbers):
        try:
            done = run("sacct", "-n", "-P", "-X", "-o", "JobID,State", "-j", ",".join(some))
        except Unreachable:
            break
        for line in done.stdout.splitlines() if done.returncode == 0 else ():
            number, _, state = line.partition("|")  # of one number the last line is the newest
            if words := state.split():  # "CANCELLED by 1000"
                looks[number] = Look(words[0])
    return looks


def in_questions(numbers: Sequence[str]) -> Iterator[Sequence[str]]:
    """So many at a time that they have room on a command line."""
    return (numbers[start : start + 1000] for start in range(0, len(numbers), 1000))


def cancel(number: str) -> None:
    """SIGTERM to all ranks, and SIGKILL after the cluster's KillWait (30 seconds by default).

    Raises:
        UserError: Slurm does not answer, or the job is somebody else's.
    """
    done = run("scancel", number)
    if done.returncode != 0:
        raise UserError.at(f"slurm://{number}", done.stderr.strip())


def run(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """One of Slurm's commands.

    Raises:
        Unreachable: It is not here, or does not come back.
    """
    try:
        done = subprocess.run(
            command,
            env=environment() if env is None else env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except FileNotFoundError:
        raise Unreachable(f"no {command[0]} on this machine") from None
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} did not come back within {TIMEOUT} seconds") from None
    if done.returncode != 0 and any(words in done.stderr.lower() for words in DOWN):
        raise Unreachable(done.stderr.strip().splitlines()[-1])
    return done
