"""Ranks under torch's agent that are forks of a standby process (`distdl.worker.standby`).

torch's agent starts each rank by a SubprocessHandler. The one here asks the standby process for a
fork, if that has the same variables; otherwise the rank starts as always.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from distdl.util.orphans import PARENT
from distdl.worker.standby import SIZE

ANSWER_S = 60.0  # longer than the imports, which the process may not have finished
# Variables that differ from rank to rank or from attempt to attempt. No import reads them.
OF_A_RANK = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
WORKER = ("-m", "distdl.worker")


@contextlib.contextmanager
def used(status: Path) -> Iterator[None]:
    """Has torch's agent start its ranks by the standby process, which is kept for the next attempt.

    Args:
        status: The attempt's status.json; the process is started with the attempt's first rank, and
            begins its imports when this attempt trains.
    """
    original = getattr(api, "get_subprocess_handler", None)
    if original is None or not hasattr(os, "pidfd_open"):  # another torch; not Linux
        yield
        return
    RankHandler.status = status
    api.get_subprocess_handler = RankHandler
    try:
        yield
    finally:
        api.get_subprocess_handler = original


class Standby:
    """The standby process, seen from the agent."""

    def __init__(self, env: Mapping[str, str], status: Path) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.env, self.status = of_the_job(env), status
        self.codes: dict[int, int] = {}
        self.ended = False
        with theirs:
            command = [sys.executable, "-m", "distdl.worker.standby", str(theirs.fileno())]
            options: dict[str, Any] = {"pass_fds": [theirs.fileno()], "start_new_session": True}
            self.process = subprocess.Popen([*command, str(status)], env=env, **options)

    def fork(self, handler: RankHandler, arguments: list[str], env: Mapping[str, str]) -> Rank:
        """Raises OSError if the process does not answer."""
        request = {"arguments": arguments, "env": dict(env), "cwd": os.getcwd()}
        files = [file.fileno() for file in (handler._stdout, handler._stderr) if file]
        socket.send_fds(self._connection, [json.dumps(request).encode()], files)
        while report := self.report(ANSWER_S):
            if "started" in report:
                return Rank(self, report["pid"])
        self.end()
        raise TimeoutError

    def report(self, seconds: float = 0.0) -> dict[str, Any]:
        """The next report, empty if there is none within this time."""
        if self.ended or not select.select([self._connection], [], [], seconds)[0]:
            return {}
        try:
            message = self._connection.recv(SIZE)
        except ConnectionError:
            message = b""
        report = json.loads(message or b"{}")
        if "code" in report:
            self.codes[report["pid"]] = report["code"]
        if not message:
            self.end()
        return report

    def end(self) -> None:
        """Ends the process, and ranks that it has started."""
        self.ended = True
        self._connection.close()
        self.process.kill()
        self.process.wait()


class Rank:
    """A forked rank, with what torch's agent uses of a Popen."""

    def __init__(self, standby: Standby, pid: int) -> None:
        self.standby, self.pid, self.returncode = standby, pid, None

    def poll(self) -> int | None:
        while self.standby.report():
            pass
        lost = -signal.SIGKILL if self.standby.ended else None  # it ends with the standby process
        return self.standby.codes.get(self.pid, lost)

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            time.sleep(0.01)
        return code


class RankHandler(SubprocessHandler):
    """Starts and ends one rank for torch's agent."""

    status: ClassVar[Path]
    standby: ClassVar[Standby | None] = None  # of this process, for all of its attempts

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        standby = RankHandler.standby
        if standby and standby.env != of_the_job(env):
            standby.end()
        # Not for the attempt with which it was started. NUMA's options would change the command.
        if standby and standby.status != self.status and args[1:3] == WORKER:
            with contextlib.suppress(OSError):
                return standby.fork(self, [*args[3:]], env)
        if standby is None or standby.ended:
            RankHandler.standby = Standby(env, self.status)
        return super()._popen(args, env)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        # The standby process waits for its ranks, so the process group of one can be gone already.
        with contextlib.suppress(ProcessLookupError):
            super().close(death_sig)


def of_the_job(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that all ranks of all attempts have in common."""
    return {k: v for k, v in env.items() if not k.startswith(OF_A_RANK) and k != PARENT}


def end() -> None:
    """Ends the standby process, if there is one: no further attempt follows."""
    if RankHandler.standby and not RankHandler.standby.ended:
        RankHandler.standby.end()
    RankHandler.standby = None
