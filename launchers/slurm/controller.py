"""Slurm's own commands: sbatch, scontrol, sacct, scancel."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distdl.errors import Problem, UserError

TIMEOUT = 60  # seconds; a command waits for an absent controller for 10 to 20
# Of the shell's variables, what a batch script and srun need to find their way.
NEEDED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR")
# How Slurm's commands find their cluster.
CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER")
# A user's defaults, which hold where the launcher's settings say nothing: sbatch prefers a variable
# to a line of the script.
DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_TIMELIMIT": "walltime",
    "SBATCH_RESERVATION": "",
}
# What sbatch says -> which setting it is about, and what to do.
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
# What any command says when there is nobody to talk to.
DOWN = ("unable to contact slurm controller", "process configuration", "configuration source")


class Unreachable(Exception):
    """Slurm did not answer: its commands are not here, or its controller is down."""


@dataclass(frozen=True)
class Look:
    """What the controller says about a job.

    Args:
        state: Slurm's own word, `RUNNING`.
        reason: Why it waits or ended, `Resources`; empty if nothing is said.
        log: Where its output goes.
    """

    state: str
    reason: str = ""
    log: Path | None = None


def environment(forwarded: Iterable[str] = (), settings: Mapping[str, Any] = {}) -> dict[str, str]:
    """Variables for Slurm's commands, and by sbatch for the job, which inherits them.

    Few are chosen, rather than named in `sbatch --export`: that takes SLURM_* variables of an
    allocation we may stand in, and makes a login shell on the node. What is forwarded goes by this
    way only, so that its value stands in no script and on no command line.

    Args:
        forwarded: Further names.
        settings: The launcher's; where one is given, the user's own default for it is left out.
    """
    defaults = [name for name, key in DEFAULTS.items() if settings.get(key) is None]
    names = {*NEEDED, *CLUSTER, *defaults, *forwarded}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def reach() -> None:
    """Whether there is a cluster that takes jobs.

    Raises:
        UserError: Slurm is not here, or its controller does not answer.
    """
    try:
        done = run("scontrol", "ping")
    except Unreachable as error:
        raise absent(str(error)) from None
    if done.returncode != 0:  # "Slurmctld(primary) at head is DOWN", one line per controller
        said = [line for line in done.stdout.splitlines() if line.endswith("DOWN")]
        raise absent(" / ".join(said) or "its controller does not answer")


def absent(why: str) -> UserError:
    remedy = "launcher=slurm submits from a login node of a cluster"
    return UserError(Problem("launcher", why, remedy))


def submit(path: Path, forwarded: Iterable[str], settings: Mapping[str, Any]) -> str:
    """Submits a script and returns the job's number.

    Raises:
        UserError: Slurm is not here, does not answer, or refuses the job.
    """
    try:
        done = run("sbatch", "--parsable", str(path), env=environment(forwarded, settings))
    except Unreachable as error:
        raise absent(str(error)) from None
    # A site's own plugin may print more around it; with several clusters ";name" follows.
    number = re.search(r"^(\d+)(;\S+)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0 and number:
        return number[1]
    said = re.sub(r"^sbatch: (error: |fatal: )?", "", done.stderr, flags=re.MULTILINE).strip()
    said = " / ".join(line for line in said.splitlines() if line)
    known = (about for words, about in REFUSALS.items() if words in said.lower())
    key, remedy = next(known, ("launcher", ""))
    raise UserError(Problem(key, f"sbatch refuses it: {said or 'without a reason'}", remedy))


def look(number: str) -> Look | None:
    """How a job stands; None if Slurm has forgotten it.

    Raises:
        Unreachable: Slurm does not answer.
    """
    done = run("scontrol", "show", "job", number)
    state = re.search(r"JobState=(\S+)", done.stdout)
    if done.returncode == 0 and state:
        reason = re.search(r"Reason=(\S+)", done.stdout)
        log = re.search(r"^\s*StdOut=(.+)$", done.stdout, re.MULTILINE)
        said = reason[1] if reason and reason[1] != "None" else ""
        return Look(state[1], said, Path(log[1].replace("%%", "%")) if log else None)
    if "invalid job id" not in done.stderr.lower():
        raise Unreachable(done.stderr.strip() or "scontrol says nothing")
    return remembered([number]).get(number)


def look_at(numbers: Sequence[str]) -> dict[str, Look]:
    """How several jobs stand, asked at once; those that Slurm has forgotten are absent.

    Raises:
        Unreachable: Slurm does not answer.
    """
    found: dict[str, Look] = {}
    for some in in_questions(numbers):
        done = run("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-j", ",".join(some))
        if done.returncode != 0 and "invalid job id" not in done.stderr.lower():
            raise Unreachable(done.stderr.strip() or "squeue says nothing")
        for line in done.stdout.splitlines():
            number, state, reason = line.split("|", 2)
            found[number] = Look(state, "" if reason == "None" else reason)
    return remembered([number for number in numbers if number not in found]) | found


def remembered(numbers: Sequence[str]) -> dict[str, Look]:
    """What the accounting says, of jobs that the controller has forgotten (MinJobAge, 5 minutes);
    empty where no accounting is kept. Source: https://slurm.schedmd.com/sacct.html"""
    found = {}
    for some in in_questions(numbers):
        try:
            done = run("sacct", "-n", "-P", "-X", "-o", "JobID,State", "-j", ",".join(some))
        except Unreachable:
            break
        for line in done.stdout.splitlines() if done.returncode == 0 else ():
            number, _, state = line.partition("|")  # of one number the last line is the newest
            if words := state.split():  # "CANCELLED by 1000"
                found[number] = Look(words[0])
    return found


def in_questions(numbers: Sequence[str]) -> Iterator[Sequence[str]]:
    """So many at a time that they have room on a command line."""
    return (numbers[start : start + 1000] for start in range(0, len(numbers), 1000))


def cancel(number: str) -> None:
    """SIGTERM to all ranks, and SIGKILL after the cluster's KillWait (30 seconds by default).

    Raises:
        UserError: Slurm does not answer, or the job is somebody else's.
    """
    try:
        done = run("scancel", number)
    except Unreachable as error:
        raise UserError(Problem("", str(error))) from None
    if done.returncode != 0:
        raise UserError(Problem(f"slurm://{number}", done.stderr.strip()))


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
