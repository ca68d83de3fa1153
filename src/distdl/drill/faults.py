"""The faults of a drill. Each is done from outside to the processes or files of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from distdl.drill import processes
from distdl.drill.drilled_run import DrilledRun
from distdl.launch.planning import Plan, is_local
from distdl.runs.checkpoints import parts_of

Ranks = set[int]
PREEMPTED, SERVER_GONE = "preempted", "server fails"
# What distdl.tracking.mlflow logs.
FAILS, BACK = "fails; training continues", "is back: sending continues"


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        inject: Does it, and returns the ranks that it hits.
        causes: Names that the report of the incident may give it.
        repair: Takes it away once it was noticed.
        lacking: Why it cannot be done here; "" if it can.
    """

    inject: Callable[[DrilledRun, Random], Ranks]
    causes: tuple[str, ...]
    repair: Callable[[DrilledRun], None] = lambda run: None
    lacking: Callable[[Plan], str] = lambda planned: ""


def kill_rank(run: DrilledRun, random: Random) -> Ranks:
    """SIGKILL to a rank."""
    rank = random.choice(run.ranks)
    run.act("SIGKILL", [rank])
    return {rank.rank}


def kill_agent(run: DrilledRun, random: Random) -> Ranks:
    """SIGKILL to the process that started a rank."""
    agent = random.choice(run.agents)
    run.act("SIGKILL", [agent])
    return {each.rank for each in run.ranks if each.host == agent.host}


def kill_host(run: DrilledRun, random: Random) -> Ranks:
    """SIGKILL to all processes of the run on a host."""
    host = random.choice(run.ranks).host
    run.act(processes.KILL_TREE, [each for each in (*run.agents, *run.ranks) if each.host == host])
    return {each.rank for each in run.ranks if each.host == host}


def sigterm(run: DrilledRun, random: Random) -> Ranks:
    """SIGTERM to a rank, as from a node that is taken away."""
    rank = random.choice(run.ranks)
    run.act("SIGTERM", [rank])
    return {rank.rank}


def sigstop(run: DrilledRun, random: Random) -> Ranks:
    """SIGSTOP to a rank, which then does not answer."""
    rank = random.choice(run.ranks)
    run.act("SIGSTOP", [rank])
    return {rank.rank}


def disk_full(run: DrilledRun, random: Random) -> Ranks:
    """No rank can write a file as large as a checkpoint any more (RLIMIT_FSIZE)."""
    size = max(part.stat().st_size for part in parts_of(run.checkpoints[0]) if part.is_file())
    run.act(str(size // 2), run.ranks)
    return {each.rank for each in run.ranks}


def corrupt_checkpoint(run: DrilledRun, random: Random) -> Ranks:
    """Flips bytes in the newest checkpoint, and kills all ranks. They are stopped before, so that
    none writes a newer one meanwhile."""
    run.act("SIGSTOP", run.ranks)
    path = max(filter(Path.is_file, parts_of(run.checkpoints[0])), key=lambda p: p.stat().st_size)
    with path.open("r+b") as file:
        file.seek(random.randrange(path.stat().st_size - 16))
        flipped = bytes(255 - byte for byte in file.read(16))
        file.seek(-16, os.SEEK_CUR)
        file.write(flipped)
    run.act("SIGKILL", run.ranks)
    return {each.rank for each in run.ranks}


def set_link(run: DrilledRun, state: str) -> None:
    command = ["nsenter", "--net", "--target", str(run.process.pid)]
    subprocess.run([*command, "ip", "link", "set", "lo", state], check=True)


def cut_link(run: DrilledRun, random: Random) -> Ranks:
    """Between the ranks of this host, which have a network of their own, packets get lost."""
    set_link(run, "down")
    return {each.rank for each in run.ranks}


def tracking_down(run: DrilledRun, random: Random) -> Ranks:
    """SIGKILL to the tracking server."""
    assert run.server is not None
    run.server.stop()
    return set()


def restart_server(run: DrilledRun) -> None:
    assert run.server is not None
    run.server.start()


def one_rank(planned: Plan) -> str:
    return "there is one rank, and nobody misses it" if planned.resources.world_size == 1 else ""


def no_limits(planned: Plan) -> str:
    return "" if hasattr(psutil.Process, "rlimit") else "needs Linux"


def no_namespace(planned: Plan) -> str:
    """Why the ranks of this host cannot have a network of their own."""
    if not is_local(planned.config) or planned.resources.accelerator != "cpu":
        return "only for ranks on the CPUs of this machine, which talk through its network"
    tools = [tool for tool in ("ip", "nsenter", "unshare") if not shutil.which(tool)]
    if os.geteuid() or tools:
        return "needs root" if os.geteuid() else f"needs {', '.join(tools)}"
    probe = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    allowed = subprocess.run(probe, capture_output=True).returncode == 0
    return one_rank(planned) if allowed else "network namespaces are not allowed"


FAULTS = {
    "kill_rank": Fault(kill_rank, ("killed",)),
    "kill_agent": Fault(kill_agent, ("killed", "lost host")),
    "kill_host": Fault(kill_host, ("lost host", "killed")),
    "sigterm": Fault(sigterm, (PREEMPTED,)),
    "sigstop": Fault(sigstop, ("stopped",), lacking=one_rank),
    "disk_full": Fault(disk_full, ("disk is full",), lacking=no_limits),
    "corrupt_checkpoint": Fault(corrupt_checkpoint, ("killed",)),
    "cut_link": Fault(
        cut_link, ("lost host", "connection"), lambda run: set_link(run, "up"), no_namespace
    ),
    "tracking_down": Fault(tracking_down, (SERVER_GONE,), restart_server),
}
