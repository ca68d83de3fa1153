"""Slurm's own commands: sbatch, scontrol, sacct, scancel."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distdl.launchers.slurm.slurm_settings import SlurmSettings
from distdl.util.errors import Forgotten, Lasting, UserError

TIMEOUT = 60  # seconds; without a controller a command waits for 10 to 20
# The shell variables that a batch script and srun need.
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR")
# The variables by which Slurm's commands find their cluster.
CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER")
# Variables with the user's defaults -> the launcher's setting. A variable is passed on only if its
# setting is null, because for sbatch a variable takes precedence over a line of the script.
DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_TIMELIMIT": "walltime",
    "SBATCH_RESERVATION": "",
}
# Words of sbatch's errors -> the setting that the error is about, and the remedy. The first that
# fits counts: several errors name a partition, an account or a node by the way.
REFUSALS = {
    **dict.fromkeys(
        ("unrecognized option", "requires an argument", "allow an argument", "invalid option"),
        ("launcher.sbatch", "sbatch --help lists the options of this cluster"),
    ),
    "invalid directive": ("launcher.sbatch", "each element is one option, with its value"),
    "account/partition": (
        "launcher.account",
        "sacctmgr show associations user=$USER lists your accounts and their partitions",
    ),
    "accounting/qos policy": (
        "launcher.qos",
        "sacctmgr show qos and sacctmgr show associations list the limits of size and time",
    ),
    "time limit": ("launcher.walltime", "sinfo -s shows the limit of each partition"),
    "node count": ("trainer.num_nodes", "sinfo -s shows how many nodes there are"),
    "number of nodes": ("trainer.num_nodes", "launcher.sbatch lists more nodes than it"),
    **dict.fromkeys(
        ("node configuration", "cpu count", "processors"),
        (
            "trainer.num_nodes",
            "ask for less: trainer.devices, launcher.cpus_per_task, launcher.mem or launcher.gpus",
        ),
    ),
    "memory": ("launcher.mem", "sinfo -o '%N %m' lists the megabytes of the nodes"),
    "preferred feature": ("launcher.sbatch", "sinfo -o '%N %f' lists the features of the nodes"),
    "feature": ("launcher.constraint", "sinfo -o '%N %f' lists the features of the nodes"),
    **dict.fromkeys(
        ("gres", "generic resource"),
        ("launcher.gpus", "sinfo -o '%N %G' lists the GPUs; launcher.gpus=gres or none"),
    ),
    "qos": ("launcher.qos", "sacctmgr show qos lists every QOS"),
    "account": ("launcher.account", "sacctmgr show associations user=$USER lists yours"),
    "array": ("launcher", "scontrol show config | grep MaxArraySize shows the limit"),
    "reservation": ("launcher.sbatch", "scontrol show reservation lists them"),
    "license": ("launcher.sbatch", "scontrol show licenses lists them"),
    "partition": ("launcher.partition", "sinfo -s lists the partitions"),
}
# Parts of the error that each command prints when no controller answers.
DOWN = ("unable to contact slurm controller", "process configuration", "configuration source")


class Unreachable(UserError):
    """Slurm does not answer: its commands are not installed, or its controller is down."""

    code = "unreachable"


class NotInstalled(Unreachable, Lasting):
    """This machine has no Slurm."""

    code = "not-installed"


def forgotten_job(number: str) -> Forgotten:
    """The error for a forgotten job: the controller forgets it MinJobAge seconds after its end."""
    what = f"Slurm does not know job {number}, or has forgotten it (MinJobAge)"
    return Forgotten(f"{what}; the log is in the run's attempts/NNN/logs/")


@dataclass(frozen=True)
class Status:
    """A job's state in Slurm's words (`RUNNING`), why it waits or ended (`Resources`; empty if
    unknown), and the file with its output."""

    state: str
    reason: str = ""
    log: Path | None = None

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


def environment(
    forwarded: Iterable[str] = (), settings: SlurmSettings | None = None
) -> dict[str, str]:
    """Variables for Slurm's commands, including `forwarded`. A job inherits those of its sbatch.

    sbatch gets a minimal environment instead of the option `--export`. That option would also pass
    on the SLURM_* variables of an allocation that this shell may be in, and would start a login
    shell on the node. So the values of forwarded variables are in no script or command line."""
    defaults = [name for name, key in DEFAULTS.items() if getattr(settings, key, None) is None]
    names = {*PASSED_ON, *CLUSTER, *defaults, *forwarded}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def reach() -> None:
    """Checks that a cluster can be reached that accepts jobs."""
    with login_node_required():
        done = run("scontrol", "ping")
        if done.returncode != 0:  # "Slurmctld(primary) at head is DOWN", one line per controller
            down = [line for line in done.stdout.splitlines() if line.endswith("DOWN")]
            raise Unreachable(" / ".join(down) or "its controller does not answer")


@contextmanager
def login_node_required() -> Iterator[None]:
    try:
        yield
    except Unreachable as error:
        raise UserError.at(
            "launcher",
            what=str(error),
            remedy="start it on a login node of a Slurm cluster",
            code=error.code,
        ) from None


def submit(path: Path, forwarded: Iterable[str], settings: SlurmSettings) -> str:
    """Submits a script; returns the number of the job."""
    with login_node_required():
        done = run("sbatch", "--parsable", str(path), env=environment(forwarded, settings))
    # A site's plugin may print other lines. With several clusters ";name" follows the number.
    number = re.search(r"^(\d+)(;\S+)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0 and number:
        return number[1]
    raise refusal(done.stderr)


def refusal(said: str) -> UserError:
    """The error for what sbatch says instead of a job's number."""
    lines = re.sub(r"^sbatch: ", "", said, flags=re.MULTILINE).split("\n")
    # With -v all options are printed, and a site's plugin may print advice: they are no errors.
    errors = [line for line in lines if line.startswith(("error: ", "fatal: "))] or lines
    reason = "\n".join(errors).lower()
    key, remedy = next(
        (about for words, about in REFUSALS.items() if words in reason), ("launcher", "")
    )
    shown = " / ".join(re.sub(r"^(error|fatal): ", "", line) for line in lines if line.strip())
    return UserError.at(
        key,
        what=f"sbatch refuses it: {shown or 'without a reason'}",
        remedy=remedy,
        code="platform-refuses",
    )


def query(number: str) -> Status:
    """The status of a job; raises Forgotten or Unreachable."""
    done = run("scontrol", "show", "job", number)
    state = re.search(r"JobState=(\S+)", done.stdout)
    if done.returncode == 0 and state:
        reason = re.search(r"Reason=(?!None\b)(\S+)", done.stdout)
        log = re.search(r"^\s*StdOut=(.+)$", done.stdout, re.MULTILINE)
        path = Path(log[1].replace("%%", "%")) if log else None
        return Status(state[1], reason[1] if reason else "", path)
    if "invalid job id" not in done.stderr.lower():
        raise Unreachable(done.stderr.strip() or "scontrol prints nothing")
    if statuses := query_accounting([number]):
        return statuses[number]
    raise forgotten_job(number)


def query_all(numbers: Sequence[str]) -> Iterator[dict[str, Status]]:
    """The status of several jobs, by one query: first of those that the controller knows, then of
    those in the accounting. Jobs that Slurm has forgotten are absent."""
    statuses: dict[str, Status] = {}
    for batch in batches(numbers):
        done = run("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-j", batch)
        if done.returncode != 0 and "invalid job id" not in done.stderr.lower():
            raise Unreachable(done.stderr.strip() or "squeue prints nothing")
        for line in done.stdout.splitlines():
            number, state, reason = line.split("|", 2)
            statuses[number] = Status(state, "" if reason == "None" else reason)
    yield statuses
    yield query_accounting([number for number in numbers if number not in statuses])


def query_accounting(numbers: Sequence[str]) -> dict[str, Status]:
    """The status, from Slurm's accounting, of jobs that the controller has forgotten (by default
    after 5 minutes); empty without accounting. Source: https://slurm.schedmd.com/sacct.html"""
    statuses = {}
    for batch in batches(numbers):
        try:
            done = run("sacct", "-n", "-P", "-X", "-o", "JobID,State", "-j", batch)
        except Unreachable:
            break
        for line in done.stdout.splitlines() if done.returncode == 0 else ():
            number, _, state = line.partition("|")  # the last line of a job is the newest
            if words := state.split():  # "CANCELLED by 1000"
                statuses[number] = Status(words[0])
    return statuses


def batches(numbers: Sequence[str]) -> Iterator[str]:
    """Job numbers joined by commas, as many as fit on a command line."""
    return (",".join(numbers[start : start + 1000]) for start in range(0, len(numbers), 1000))


def nodes(partition: str | None) -> dict[str, bool]:
    """The nodes of some partitions (`a,b`; None: the default one), and whether each can run jobs.
    Source: https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES"""
    rows = [line.split("|") for line in run("sinfo", "-hNo", "%N|%P|%T").stdout.splitlines()]
    wanted = (partition or "").split(",")
    return {
        name: not re.match(r"down|drain|fail|inval|unknown|.*\*$", state)
        for name, of, state in rows
        if (of.rstrip("*") in wanted if partition else of.endswith("*"))
    }


def cancel(number: str) -> None:
    """Sends SIGTERM to all ranks, and SIGKILL after the cluster's KillWait (30 s by default)."""
    done = run("scancel", number)
    if done.returncode != 0:
        raise UserError.at(f"slurm://{number}", what=done.stderr.strip(), code="platform-refuses")


def run(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
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
        raise NotInstalled(f"{command[0]} is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} did not end within {TIMEOUT} seconds") from None
    if done.returncode != 0 and any(words in done.stderr.lower() for words in DOWN):
        raise Unreachable(done.stderr.strip().splitlines()[-1])
    return done
