"""One run of a drill, started in a process of its own, and seen from outside."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distdl.config import consent
from distdl.job import JobState
from distdl.launch import resuming, sweeps
from distdl.launch.planning import Plan
from distdl.runs.checkpoints import CheckpointStore
from distdl.runs.directory import Attempt, RunDirectory, shown
from distdl.tools.drill import processes
from distdl.tools.drill.subjects import Subject
from distdl.tools.drill.tracking_server import TrackingServer
from distdl.util.orphans import die_with_parent
from distdl.util.processes import LIBC, start_time

TICK = 0.02  # seconds between two looks
NEW_NETWORK = 0x40000000  # CLONE_NEWNET, linux/sched.h
END_S = 30.0


class DrilledRun:
    """A run, and the command that starts it.

    Args:
        planned: How it starts.
        subject: What it runs.
        limit: Seconds that each part of it may take: until the fault is noticed, and so on.
        own_network: Whether its processes get a network of their own, in which they can reach only
            each other. Needs root.
        server: To which it sends its metrics; None: to nobody.
    """

    def __init__(
        self,
        planned: Plan,
        subject: Subject,
        limit: float,
        own_network: bool = False,
        server: TrackingServer | None = None,
    ) -> None:
        self.planned = planned
        self.subject = subject
        self.run = planned.run
        self.limit = limit
        self.own_network = own_network
        self.server = server
        self.log = planned.run.path.with_suffix(".log")
        self.first = Attempt(planned.run.path / "attempts" / "001")
        self.start(planned)

    def start(self, what: Plan | RunDirectory) -> None:
        """Starts a run by its plan, or resumes one."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        agreed = consent.repeated(self.planned.launch.typed)
        arguments = (what, agreed, self.log, self.own_network, os.getpid())
        self.process: Any = context.Process(target=_command, args=arguments)
        self.process.start()

    def close(self) -> None:
        """Ends what still runs."""
        if self.process.is_alive() and not self.planned.launch.is_local:
            self.process.terminate()  # cancels the job
            self.process.join(END_S)
        pid = self.process.pid
        last = self.run.last_attempt() or self.first
        left = [(socket.gethostname(), f"{pid}:{start_time(pid)}")]
        left += [(each.host, name) for each in last.ranks() for name in each[2:]]
        self.act(processes.KILL_TREE, left)

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Waits until something is the case; False if the command ends first, or time is over."""
        deadline = time.monotonic() + self.limit
        while not condition():
            if not self.process.is_alive() or time.monotonic() > deadline:
                return condition()
            time.sleep(TICK)
        return True

    @property
    def checkpoints(self) -> list[Path]:
        return CheckpointStore(self.run.checkpoints).all()

    @property
    def succeeded(self) -> bool:
        last = self.run.last_attempt()
        return last is not None and last.state() is JobState.SUCCEEDED

    def progress(self, attempt: int = 1) -> float:
        """How far an attempt has come; 0 before it has begun."""
        return self.subject.progress(self, attempt)

    def has_logged(self, text: str) -> bool:
        log = self.first.logs / "rank_0.log"
        return log.exists() and text in log.read_text(errors="replace")

    def act(self, action: str, on: list[tuple[str, str]], *, programs: bool = False) -> None:
        """Does something to processes, or to the programs that they have started."""
        code = str(self.first.path / "bundle" / "code")
        action = f"{processes.PROGRAM}{action}" if programs else action
        processes.act(action, on, dict(self.planned.config.launcher), code)


def _command(
    what: Plan | RunDirectory, agreed: Sequence[str], log: Path, own_network: bool, parent: int
) -> None:
    """The command in its own process: its output goes to a file."""
    die_with_parent(parent)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if own_network:
        assert LIBC is not None
        LIBC.unshare(NEW_NETWORK)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    planned = what if isinstance(what, Plan) else resuming.plan(what, agreed)
    sweeps.start_here(planned, ["distdl", "resume", shown(planned.run.path)], parent)
