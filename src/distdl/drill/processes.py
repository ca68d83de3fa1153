"""The processes of a run, by its own records, and what a drill does to them.

`python -m distdl.drill.processes ACTION PID:START ...` acts on the processes of another host.
"""

from __future__ import annotations

import shlex
import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from distdl.launchers.mpi.hosts import Setup
from distdl.runs.directory import Attempt
from distdl.util.processes import is_alive

KILL_TREE = "kill-tree"  # SIGKILL, also to all processes that were started below
ANSWER_S = 30.0  # for another host


class RunProcess(NamedTuple):
    """A process, and the rank that it runs or has started."""

    rank: int
    host: str
    pid: int
    birth: str


def of_attempt(attempt: Attempt) -> tuple[list[RunProcess], list[RunProcess]]:
    """The processes of all ranks, and for each rank its agent: the process that started it. Empty
    until the ranks are connected."""
    ranks, agents = list[RunProcess](), list[RunProcess]()
    for row in attempt.ranks():
        number, host = row["rank"], row["host"]
        ranks.append(RunProcess(number, host, row["pid"], row["birth"]))
        # A single rank runs in the process that was started.
        agent = row if row["launcher"] == "single" else row["parent"]
        agents.append(RunProcess(number, host, agent["pid"], agent["birth"]))
    return ranks, agents


def act(
    action: str, processes: Iterable[RunProcess], launcher: Mapping[str, Any], code: str
) -> None:
    """Does the same to several processes.

    Args:
        action: The name of a signal, KILL_TREE, or the number of bytes that a file may have.
        launcher: Its settings; those of mpi say how other hosts are reached.
        code: The folder with distdl's code on other hosts.
    """
    by_host: dict[str, set[str]] = {}
    for each in processes:
        by_host.setdefault(each.host, set()).add(f"{each.pid}:{each.birth}")
    for host, names in by_host.items():
        if host == socket.gethostname():
            main([action, *names])
            continue
        python = launcher.get("python") or sys.executable
        command = shlex.join([python, "-m", "distdl.drill.processes", action, *names])
        ssh = Setup(str(launcher["ssh"]), "", python, copy=False)
        ssh.run(host, f"PYTHONPATH={shlex.quote(code)} {command}", timeout=ANSWER_S, check=True)


def main(argv: list[str]) -> None:
    action, *names = argv
    targets = []
    for name in names:
        pid, _, birth = name.partition(":")
        if birth and is_alive(int(pid), birth):  # never another process with the same number
            with suppress(psutil.NoSuchProcess):
                found = psutil.Process(int(pid))
                targets += [found, *(found.children(recursive=True) if action == KILL_TREE else ())]
    for target in dict.fromkeys(targets):
        with suppress(psutil.NoSuchProcess):
            if action.isdigit():
                target.rlimit(psutil.RLIMIT_FSIZE, (int(action), int(action)))
            else:
                target.send_signal(
                    signal.SIGKILL if action == KILL_TREE else signal.Signals[action]
                )


if __name__ == "__main__":
    main(sys.argv[1:])
