"""Runs a rank's program: before it, while it runs, and after it."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig

from distdl.config import programs
from distdl.config.recipe import hash_of
from distdl.config.schema import Program
from distdl.health.watchdog import STEP_S
from distdl.incident import sights
from distdl.incident.words import OF_PROGRAM
from distdl.job import JobState, Resources
from distdl.program import ending, meeting, variables
from distdl.program.folder import NotKept, SyncedFolder, written_to
from distdl.program.output import Output
from distdl.program.process import NotStarted, Process
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.runs import failures
from distdl.runs.directory import Attempt, RunDirectory, shown
from distdl.stores import is_remote
from distdl.util.errors import NotRun
from distdl.util.exit_codes import EXIT_HUNG, EXIT_PREEMPTED
from distdl.util.processes import start_time
from distdl.util.redact import redact
from distdl.util.screen import say

log = logging.getLogger(__name__)

PLACE = "DISTDL_PROGRAM_CHECKPOINTS"  # a store's URI, which a launcher may set for all its ranks
GRACE_S = 30.0  # of a launcher that has no such setting
RESERVE_S = 2.0  # of the grace, for the rank itself
LOOK_S = 2.0  # between two looks whether a signal has stopped the program


class ProgramFailed(Exception):
    """The program of this rank has failed, which is recorded. `code` is the rank's exit code."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(what)
        self.code = code


@dataclass(frozen=True)
class ProgramRank:
    """A rank that runs a program.

    Args:
        attempt: Of the run.
        environment: Where the rank is.
        resources: The size of the run.
        stop: Whether the rank is asked to end.
        launch: The attempt's launch.yaml.
        folder: In which the program is started.
        python_path: The folders of the user's modules.
        tracked: Rank 0's variables of the tracked run, which all ranks get.
    """

    attempt: Attempt
    environment: Environment
    resources: Resources
    stop: StopRequest
    launch: Mapping[str, Any]
    folder: Path
    python_path: Sequence[str] = ()
    tracked: Mapping[str, str] = field(default_factory=dict)

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.attempt.path.parents[1])

    @property
    def grace(self) -> float:
        """Seconds from a signal until the program is killed, before the launcher kills the rank. Of
        the rest its checkpoints are copied."""
        seconds = (self.launch["where"].get("launcher") or {}).get("grace_seconds")
        given = float(seconds) if isinstance(seconds, int | float) and seconds > 0 else GRACE_S
        return max(given - RESERVE_S, given / 2)

    @property
    def job(self) -> str:
        """Names this attempt to its ranks, and to no others."""
        return hash_of(f"{self.launch['run_id']} {self.attempt.number}", 32)


def run(config: DictConfig, rank: ProgramRank) -> None:
    """Runs this rank's program until it ends.

    Raises:
        ProgramFailed: It failed, which is recorded.
        Stopped: It was asked to end, or says by exit code 75 that it is to be started again.
        NotRun: The machine or the network keeps it from running: other ranks did not come, a folder
            cannot be written.
    """
    program = Program.of(config[programs.SECTION])
    if program.per == "node" and rank.environment.local_rank != 0:
        return
    try:
        _run(program, rank)
    except OSError as error:
        raise NotRun(str(error)) from error


def _run(program: Program, rank: ProgramRank) -> None:
    place = variables.placed(rank.environment, program.per == "node")
    # Until this rank's own program has ended, another one of the node copies no last time.
    writes = contextlib.ExitStack()
    checkpoints, synced = _checkpoints(program, rank, writes)
    env = variables.inherited()
    env |= variables.of_torch(place, rank.resources.devices)
    env |= variables.of_run(rank.launch["run_id"], rank.attempt.number, checkpoints, program.params)
    paths = [*rank.python_path, *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    serves = variables.serves(program, place.rank, place.world_size)
    met = _meet(program, place, rank)
    try:
        env |= met.told[0].get("tracked") or {}
        addresses = [str(each.get("address")) for each in met.told]
        env |= variables.of_framework(program, place, addresses)
        if place.rank == 0:
            _record_ranks(rank, met.told)
            _print_start(program, rank)
        failed = True
        try:
            with writes:
                _execute(program, rank, env, met if serves else None)
            met.end()
            failed = False
        except Stopped:
            failed = False
            raise
        finally:
            if synced is not None:
                synced.finish(rank.stop, rank.grace / 4, wait=not failed)
    finally:
        met.close()


def _checkpoints(
    program: Program, rank: ProgramRank, writes: contextlib.ExitStack
) -> tuple[Path, SyncedFolder | None]:
    """The folder of the program's checkpoints, and its copy in a store, if it needs one. The first
    rank of a node restores and copies it. `writes` is then open while the program may write."""
    place = program.checkpoints or os.environ.get(PLACE)
    if not place or not is_remote(place):
        folder = Path(place).expanduser() if place else rank.run.checkpoints
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"{folder} cannot be made, for the checkpoints of the program: {error.strerror}"
            raise NotKept(what) from None
        return folder.absolute(), None
    environment = rank.environment
    folder = Path(tempfile.gettempdir(), f"distdl-{rank.job}-{environment.node_rank}")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise NotKept(f"{folder} belongs to somebody else")
    writes.enter_context(written_to(folder))
    if environment.local_rank != 0:
        return folder, None
    below = f"{place.rstrip('/')}/{rank.launch['run_id']}"
    synced = SyncedFolder(folder, below, environment.node_rank, program.sync)
    count = synced.restore()
    log.info("%d files of checkpoints are restored from %s", count, redact(below))
    synced.start()
    return folder, synced


def _meet(program: Program, place: Environment, rank: ProgramRank) -> meeting.Meeting:
    """Lets the ranks tell each other where they are, if they need to know."""
    own = os.getpid()
    # A single rank runs in the process that was started.
    agent = own if rank.environment.launcher == "single" else os.getppid()
    told: dict[str, Any] = {
        "rank": rank.environment.rank,
        "host": socket.gethostname(),
        "process": f"{own}:{start_time(own)}",
        "agent": f"{agent}:{start_time(agent)}",
    }
    if place.rank == 0:
        told["tracked"] = dict(rank.tracked)
    count = place.world_size
    keep = any(variables.serves(program, each, count) for each in range(count))
    with contextlib.ExitStack() as stack:
        if program.framework in ("tensorflow", "jax"):
            held = stack.enter_context(meeting.reserve_port(place))
            host = meeting.own_address(place)
            told["address"] = meeting.with_port(host, held.getsockname()[1])
        return meeting.meet(place, told, rank.job, rank.stop, keep=keep)


def _record_ranks(rank: ProgramRank, told: Sequence[Mapping[str, Any]]) -> None:
    keys = ("host", "process", "agent")
    rows = [{key: str(each.get(key)) for key in keys} for each in told]
    numbers = [int(each.get("rank") or 0) for each in told]
    pairs = zip(rows, numbers, strict=True)
    rank.attempt.record_ranks([{**row, "rank": number} for row, number in pairs])


def _print_start(program: Program, rank: ProgramRank) -> None:
    size = rank.resources
    per = "" if program.per == "rank" else ", a program per node"
    say(f"run     {shown(rank.run.path)}  (attempt {rank.attempt.number})")
    say(f"on      {size.num_nodes} x {size.devices} {size.accelerator}{per}")
    say(f"program {redact(shlex.join(program.command))}")
    for note in rank.launch.get("notes") or []:
        say(f"note    {note}")
    say()


def _execute(
    program: Program,
    rank: ProgramRank,
    env: Mapping[str, str],
    served: meeting.Meeting | None,
) -> None:
    """Starts the program and waits for it. `served`: it ends with rank 0's, which it serves."""
    number = rank.environment.rank
    rank.stop.check()
    output = Output(rank.attempt.logs / f"rank_{number}.log")
    try:
        process = Process(program.command, env, rank.folder, output.writing)
    except NotStarted as error:
        output.started()
        output.close()
        rank.attempt.record_error(number, "NotStarted", str(error), "", error.code, program=True)
        log.error("%s", error)
        raise ProgramFailed(str(error), error.code) from None
    output.started()
    log.debug("the program is process %d", process.pid)
    looks = Looks(process, rank, served)
    remote = is_remote(program.checkpoints or os.environ.get(PLACE) or "")
    grace = rank.grace / 2 if remote else rank.grace
    end = process.wait(rank.stop, grace, looks.reason)
    output.close()
    if end.why == SERVED:
        return
    if looks.stopped and end.asked:
        sights.write(rank.attempt.path, looks.sight())
    if end.why:
        failures.record(
            rank.attempt.errors, number, failures.HANG, end.why, code=EXIT_HUNG, program=True
        )
        raise ProgramFailed(end.why, EXIT_HUNG)
    # If it ended by itself, and its rank was asked to end because the others failed of that, it is
    # the cause.
    if end.asked or (rank.stop and not ending.is_own(end.code, output.tail())):
        assert rank.stop.state is not None
        raise Stopped(rank.stop.state, f"{rank.stop.signal}; the program ended with {end.code}")
    if end.code == EXIT_PREEMPTED:
        raise Stopped(
            JobState.PREEMPTED, f"the program asks to be started again (exit code {end.code})"
        )
    if end.code:
        ending.record(rank.attempt, number, end.code, output.tail())
        what = f"killed by signal {-end.code}" if end.code < 0 else f"exit code {end.code}"
        raise ProgramFailed(
            f"the program ended: {what}", end.code if end.code > 0 else 128 - end.code
        )


SERVED = "rank 0 has ended"


class Looks:
    """What a rank looks at while its program runs. Only a program that a signal has stopped makes
    no progress for sure: what else it does is its own affair."""

    def __init__(self, process: Process, rank: ProgramRank, served: meeting.Meeting | None) -> None:
        self.process = process
        self.rank = rank
        self.served = served
        settings = rank.launch["where"].get("watchdog") or {}
        self.limit = float(settings.get("timeout") or STEP_S)
        self.watches = bool(settings.get("enabled", True))
        self.every = min(LOOK_S, self.limit / 4)
        self._looked = time.monotonic()
        self._seen = False
        # Seconds for which the program is known to be stopped, up to the last look.
        self.stopped = 0.0

    def reason(self) -> str:
        """Why the program must be ended now; "" if it need not be."""
        if self.served is not None and self.served.has_ended():
            return SERVED
        passed = time.monotonic() - self._looked
        if passed < self.every:
            return ""
        self._looked += passed
        # At the first look that sees it, nobody knows since when.
        before = self._seen
        self._seen = self.process.stopped()
        self.stopped = self.stopped + passed if self._seen and before else 0.0
        if not self.watches or self.stopped <= self.limit:
            return ""
        return self._what()

    def _what(self) -> str:
        return f"the program was stopped by a signal for {self.stopped:.0f} s"

    def sight(self) -> dict[str, Any]:
        """The program as the report of the incident needs it, if it is stopped."""
        place = self.rank.environment
        return {
            "rank": place.rank,
            "world_size": place.world_size,
            "host": socket.gethostname(),
            "how": OF_PROGRAM,
            "process": psutil.STATUS_STOPPED,
            "phase": self._what(),
            "age": self.stopped,
        }
