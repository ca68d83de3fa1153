"""The faults of a drill. Each is done from outside to the processes or files of a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from distdl.launch.planning import Plan
from distdl.runs.attempt import RankProcess
from distdl.tools.drill.drilled_run import DrilledRun
from distdl.tools.drill.processes import KILL_TREE
from distdl.tools.drill.subjects import largest_file

# What distdl.tracking.mlflow logs.
FAILS, BACK = "fails; training continues", "is back: sending continues"


class Fault(NamedTuple):
    """A fault.

    Args:
        inject: Does it, and returns the ranks that it hits.
        causes: Names that the report of the incident may give it.
        repair: Takes it away once it was noticed.
        lacking: Why it cannot be done here; "" if it can.
    """

    inject: Callable[[DrilledRun, Random], list[RankProcess]]
    causes: tuple[str, ...]
    repair: Callable[[DrilledRun], None] = lambda run: None
    lacking: Callable[[Plan], str] = lambda planned: ""


def send(signal: str) -> Callable[[DrilledRun, Random], list[RankProcess]]:
    """A signal to the process that computes for one rank."""

    def inject(run: DrilledRun, random: Random) -> list[RankProcess]:
        rank = random.choice(run.first.ranks())
        run.subject.signal(run, signal, [rank])
        return [rank]

    return inject


def ask(run: DrilledRun, random: Random) -> list[RankProcess]:
    """SIGTERM to a rank, from which a program gets it."""
    rank = random.choice(run.first.ranks())
    run.act("SIGTERM", [(rank.host, rank.process)])
    return [rank]


def kill_agent(run: DrilledRun, random: Random) -> list[RankProcess]:
    """SIGKILL to the process that started a rank."""
    rank = random.choice(run.first.ranks())
    run.act("SIGKILL", [(rank.host, rank.agent)])
    return [each for each in run.first.ranks() if each.agent == rank.agent]


def kill_host(run: DrilledRun, random: Random) -> list[RankProcess]:
    """SIGKILL to all processes of the run on a host."""
    host = random.choice(run.first.ranks()).host
    lost = [each for each in run.first.ranks() if each.host == host]
    run.act(KILL_TREE, [(host, name) for each in lost for name in (each.agent, each.process)])
    return lost


def disk_full(run: DrilledRun, random: Random) -> list[RankProcess]:
    """No rank can write a file as large as a checkpoint any more (RLIMIT_FSIZE)."""
    size = run.subject.size_of_a_checkpoint(run)
    run.subject.signal(run, str(size // 2), run.first.ranks())
    return run.first.ranks()


def corrupt_checkpoint(run: DrilledRun, random: Random) -> list[RankProcess]:
    """Flips bytes in the newest checkpoint, and kills all ranks. They are stopped before, so that
    none writes a newer one meanwhile."""
    ranks = [(each.host, each.process) for each in run.first.ranks()]
    run.act("SIGSTOP", ranks)
    path = largest_file(run.checkpoints[0])
    with path.open("r+b") as file:
        file.seek(random.randrange(path.stat().st_size))
        flipped = bytes(255 - byte for byte in file.read(1))
        file.seek(-1, os.SEEK_CUR)
        file.write(flipped)
    run.act("SIGKILL", ranks)
    return run.first.ranks()


def set_link(run: DrilledRun, state: str) -> None:
    """`down`: what the ranks of this host, which have a network of their own, send is lost."""
    command = f"nsenter --net --target {run.process.pid} ip link set lo {state}"
    subprocess.run(command.split(), check=True)


def cut_link(run: DrilledRun, random: Random) -> list[RankProcess]:
    set_link(run, "down")
    return run.first.ranks()


def tracking_down(run: DrilledRun, random: Random) -> list[RankProcess]:
    """SIGKILL to the tracking server."""
    assert run.server is not None
    run.server.stop()
    return []


def restart_server(run: DrilledRun) -> None:
    assert run.server is not None
    run.server.start()


def one_rank(planned: Plan) -> str:
    return "there is one rank, and nobody misses it" if planned.resources.world_size == 1 else ""


def no_namespace(planned: Plan) -> str:
    """Why the ranks of this host cannot have a network of their own."""
    if not planned.launch.is_local or planned.resources.accelerator != "cpu":
        return "only for ranks on the CPUs of this machine, which talk through its network"
    if os.geteuid():
        return "needs root"
    probe = ["sh", "-c", "unshare --net ip link set lo up && nsenter --version"]
    allowed = subprocess.run(probe, capture_output=True).returncode == 0
    return one_rank(planned) if allowed else "needs network namespaces, iproute2 and util-linux"


FAULTS = {
    "kill_rank": Fault(send("SIGKILL"), ("killed",)),
    "kill_agent": Fault(kill_agent, ("killed", "lost host")),
    "kill_host": Fault(kill_host, ("lost host", "killed")),
    "sigterm": Fault(ask, ("preempted",)),
    "sigstop": Fault(send("SIGSTOP"), ("stopped",), lacking=one_rank),
    "disk_full": Fault(disk_full, ("disk is full",)),
    "corrupt_checkpoint": Fault(corrupt_checkpoint, ("killed",)),
    "cut_link": Fault(
        cut_link, ("lost host", "connection"), lambda run: set_link(run, "up"), no_namespace
    ),
    "tracking_down": Fault(tracking_down, ("server fails",), restart_server),
}
