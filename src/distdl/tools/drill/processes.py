"""What a drill does to processes: `python -m distdl.tools.drill.processes ACTION PID:START ...`."""

from __future__ import annotations

import shlex
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import psutil

from distdl.launchers.mpi.hosts import Setup
from distdl.program import guard
from distdl.util.processes import is_alive, start_time

KILL_TREE = "kill-tree"  # SIGKILL, also to all processes that were started below
ANSWER_S = 30.0  # for another host
# Before an action: it is done to the programs that these ranks have started.
PROGRAM = "program:"


def act(
    action: str, processes: Iterable[tuple[str, str]], launcher: Mapping[str, Any], code: str
) -> None:
    """Does the same to several processes.

    Args:
        action: The name of a signal, KILL_TREE, or the number of bytes that a file may have;
            behind PROGRAM, if it is for the programs of these ranks.
        processes: (host, `pid:start time`) of each; one with another start time is left alone.
        launcher: Its settings; those of mpi say how other hosts are reached.
        code: The folder with distdl's code on other hosts.
    """
    by_host: dict[str, set[str]] = {}
    for host, process in processes:
        by_host.setdefault(host, set()).add(process)
    for host, names in by_host.items():
        if host == socket.gethostname():
            main([action, *names])
            continue
        python = launcher.get("python") or sys.executable
        command = shlex.join([python, "-m", "distdl.tools.drill.processes", action, *names])
        ssh = Setup(str(launcher["ssh"]), "", python, copy=False)
        ssh.run(host, f"PYTHONPATH={shlex.quote(code)} {command}", timeout=ANSWER_S, check=True)


def main(argv: list[str]) -> None:
    action, *names = argv
    with suppress(psutil.NoSuchProcess):
        pairs = (name.split(":", 1) for name in names)
        targets = [
            psutil.Process(int(pid)) for pid, birth in pairs if birth and is_alive(int(pid), birth)
        ]
        if action.startswith(PROGRAM):
            action = action.removeprefix(PROGRAM)
            targets = [each for target in targets for each in _programs(target)]
        deep = action == KILL_TREE or action.isdigit()
        below = [target.children(recursive=True) for target in targets] if deep else []
        for target in dict.fromkeys([*targets, *(each for some in below for each in some)]):
            with suppress(psutil.NoSuchProcess):
                if action.isdigit():
                    target.rlimit(psutil.RLIMIT_FSIZE, (int(action), int(action)))
                else:
                    number = signal.SIGKILL if action == KILL_TREE else signal.Signals[action]
                    target.send_signal(number)


def _programs(rank: psutil.Process) -> Iterator[psutil.Process]:
    """What a rank has started as its program: it has the rank's name in its environment."""
    name = f"{rank.pid}:{start_time(rank.pid)}"
    for each in rank.children():
        with suppress(psutil.Error):
            if each.environ().get(guard.VARIABLE) == name:
                yield each


if __name__ == "__main__":
    main(sys.argv[1:])
