"""How torch's agent starts ranks: none loses a signal, and some are forks of a standby process.

torch's agent starts each rank by a SubprocessHandler. The one here holds back the signals that end
a job until the rank handles them. From the second attempt of a command on, it asks the standby
process (`distdl.agent.standby`) for a fork; if it gets none, the rank starts as always.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from distdl.agent.standby import SIZE
from distdl.ranks import stopping
from distdl.util import helpers

ANSWER_S = 60.0  # longer than the imports, which the process may not have finished


def use(status: Path, standby: bool) -> None:
    """Changes how torch's agent starts the ranks of this attempt.

    Args:
        status: The status.json of this attempt.
        standby: Start them as forks of the standby process. If an earlier attempt has left none,
            they start as always, and one is started for the next attempt.
    """
    if hasattr(api, "get_subprocess_handler"):  # not with another torch
        RankHandler.status = status
        RankHandler.by_standby = standby and hasattr(os, "pidfd_open")
        RankHandler.started = []
        api.get_subprocess_handler = RankHandler  # type: ignore[assignment]


def end_ranks(grace_seconds: float) -> None:
    """Ends the ranks that still run: a signal can interrupt torch's agent after it has started a
    rank and before it knows of it. Such a rank would go on after its attempt."""
    running = [rank for rank in RankHandler.started if rank.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, number)
        deadline = time.monotonic() + grace_seconds
        for rank in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, deadline - time.monotonic()))
        running = [rank for rank in running if rank.poll() is None]


def end() -> None:
    """Ends the standby process, if there is one: no further attempt follows."""
    if RankHandler.standby:
        RankHandler.standby.end()
        RankHandler.standby = None


class Standby:
    """The standby process, seen from the agent."""

    def __init__(self, env: Mapping[str, str], status: Path) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.status = status
        self.ended = False
        self.codes: dict[int, int | None] = {}  # by process number; None: it runs
        command = [sys.executable, "-m", "distdl.agent.standby", str(theirs.fileno()), str(status)]
        with theirs, helpers.held():  # it never lets them come: it ends with the command
            self._process = subprocess.Popen(
                command, env=env, pass_fds=[theirs.fileno()], start_new_session=True
            )

    def fork(self, arguments: list[str], env: Mapping[str, str], files: list[int]) -> ForkedRank:
        """Raises OSError if the process has ended, or does not answer."""
        request = json.dumps({"arguments": arguments, "env": dict(env)})
        socket.send_fds(self._connection, [request.encode()], files)
        while report := self.report(ANSWER_S):
            if report[1] is None:
                return ForkedRank(self, report[0])
        self.end()
        raise TimeoutError

    def report(self, seconds: float = 0.0) -> list[Any]:
        """The next report: a rank that has started, or ended; empty if there is none in time."""
        if self.ended or not select.select([self._connection], [], [], seconds)[0]:
            return []
        report: list[Any] = []
        with contextlib.suppress(ConnectionError):
            report = json.loads(self._connection.recv(SIZE) or b"[]")
        if report:
            self.codes[report[0]] = report[1]
        else:
            self.end()
        return report

    def end(self) -> None:
        """Ends the process, and ranks that it has started."""
        self.ended = True
        self._connection.close()
        self._process.kill()
        self._process.wait()


class ForkedRank:
    """A forked rank, with what torch's agent uses of a Popen. It ends with the standby process."""

    def __init__(self, standby: Standby, pid: int) -> None:
        self.standby = standby
        self.pid = pid

    def poll(self) -> int | None:
        while self.standby.report():
            pass
        code = self.standby.codes[self.pid]
        return -signal.SIGKILL if code is None and self.standby.ended else code

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            time.sleep(0.01)
        return code


Started = subprocess.Popen[Any] | ForkedRank


class RankHandler(SubprocessHandler):
    """Starts and ends one rank for torch's agent."""

    status: ClassVar[Path]
    by_standby: ClassVar = False
    standby: ClassVar[Standby | None] = None
    started: ClassVar[list[Started]] = []  # of this attempt

    # ANN401: torch says that it is a Popen, and a ForkedRank has all that torch uses of one.
    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:  # noqa: ANN401
        with stopping.deferred():
            process = self._start(args, env)
            RankHandler.started.append(process)
        return process

    def _start(self, args: tuple[str, ...], env: dict[str, str]) -> Started:
        standby = RankHandler.standby
        if not self.by_standby:
            pass
        elif standby is None or standby.ended:
            RankHandler.standby = Standby(env, self.status)
        elif standby.status != self.status and args[1:3] == ("-m", "distdl.worker"):  # no numactl
            files = [file.fileno() for file in (self._stdout, self._stderr) if file]
            with contextlib.suppress(OSError):
                return standby.fork([*args[3:]], env, files)
        if args[1:3] != ("-m", "distdl.worker"):  # it would never let them come
            return super()._popen(args, env)
        with helpers.held():
            return super()._popen(args, env)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        # The standby process waits for its ranks, so the process group of one can be gone already.
        with contextlib.suppress(ProcessLookupError):
            super().close(death_sig)
