"""Ends a rank that makes no progress, and says what it was doing.

A thread of each rank looks twice a second whether the main thread has done anything new
(`RankHeartbeat`), and tells the rank's monitor, a process of its own, and the other ranks by their
common store. When one rank has made no progress for too long, all of them write what they were
doing, and end with exit code 70.

Outside a step (set-up, with the first batch of a loader; a checkpoint; the end of an epoch) a limit
is longer, and a process that
works makes progress. A rank may wait for others as long as one of them may take longer than itself:
in a debugger, a download, a compilation, a checkpoint.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from distdl.config.own_code import innermost, main_thread
from distdl.health import flight, machine, stacks
from distdl.health.heartbeat import OPTIMIZER, PREPARE, Frame, RankHeartbeat
from distdl.health.peers import Peers
from distdl.health.store import LOOK_S, WRITE_S, RunStore, within
from distdl.health.straggler import Slowdown
from distdl.incident import sights
from distdl.incident.words import STOPPED
from distdl.ranks.environment import Environment
from distdl.runs import failures
from distdl.runs.directory import Attempt
from distdl.util import helpers
from distdl.util.exit_codes import EXIT_HUNG

log = logging.getLogger(__name__)

TICK = 0.5  # seconds between two looks
AWAY = 5.0  # a longer time without a look: this process, or the machine, was stopped
STEPS = 20  # as many steps are timed before their length decides
STEP_S = 600.0  # the limit in a step until then
FACTOR = 30  # after that: as many times the longest wait in a step,
FLOOR_S = 300.0  # but not less than this
LONG_S = 1800.0  # the limit elsewhere, and of a compilation: that of the process group
BUSY = 0.02  # of a core: elsewhere, a process that uses more makes progress
OTHERS_S = 2.5  # for the other ranks to write what they were doing
REPORT_S = 10.0  # for a rank to report its own hang
END_S = 5.0  # for the monitor to end
TELL_S = 8.0  # without an answer of the store: the user is told
SOON = 1.0  # seconds without progress after which a rank asks what it waits for
INNERMOST = 12  # frames in which a debugger shows that it waits for its user
DEBUGGERS = re.compile(r"/(bdb|pdb)\.py$|/(pydevd|debugpy|pudb|ipdb)[/_.]")
COMPILERS = re.compile(r"/torch/(_dynamo/convert_frame|_inductor/compile_fx)\.py$")


class Watchdog:
    """The watchdog of this rank, made in its main thread.

    Args:
        attempt: Its folder gets what is written.
        environment: Of this rank.
        timeout: The limit of a step's phases in seconds; None: learned from the steps.
    """

    def __init__(
        self, attempt: Attempt, environment: Environment, timeout: float | None = None
    ) -> None:
        self.attempt = attempt
        self.environment = environment
        self.timeout = timeout
        self.heartbeat = RankHeartbeat()
        self.peers = Peers(environment, self.heartbeat, self._report_straggler)
        self._main_thread = stacks.ThreadStack()
        self._host = socket.gethostname()
        # It has to be written to: a store may still answer what it remembers.
        reserve = failures.reserved(attempt.errors, environment.rank)
        self.store = RunStore(attempt.path, reserve)
        self._away = 0.0  # seconds for which the store has not answered
        self._pids = [os.getpid()] if environment.world_size == 1 else []  # unknown yet
        self._stop = threading.Event()
        self._kills = machine.oom_kills(os.getpid())
        self._number = 0
        self._done = self.heartbeat.progress
        self._longest = 0.0  # seconds without progress in a step that then went on
        self._progress = self._looked = time.monotonic()
        self._used = 0.0  # seconds of processor time, without those of the thread that looks

    def start(self) -> None:
        """Starts the monitor and the thread."""
        flight.enable()
        self._stacks = tempfile.TemporaryFile("ab+", buffering=0)  # noqa: SIM115
        # Both also hold in the loader workers that this process forks.
        faulthandler.register(signal.SIGUSR2, self._stacks)
        faulthandler.enable(self._stacks)
        monitor = [sys.executable, "-P", str(Path(__file__).with_name("monitor.py"))]
        files = [self._stacks.fileno(), self.heartbeat.file.fileno()]
        # Who reads the rank's output must see its end when the rank ends.
        error = None if self.environment.world_size == 1 else subprocess.DEVNULL
        with helpers.held():  # the monitor outlives the rank
            self._monitor = subprocess.Popen(
                monitor,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=error,
                pass_fds=files,
            )
        self._tell(
            {
                "pid": os.getpid(),
                "rank": self.environment.rank,
                "path": sys.path,
                "attempt": str(self.attempt.path),
                "files": files,
                "alone": self.environment.world_size == 1,
                "limit": self.timeout or STEP_S,
            }
        )
        self._announce()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def join(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Called with the rank table (`host` and `pid` of every rank), in a process group."""
        if len(ranks) > 1:
            local = [int(each["pid"]) for each in ranks if each["host"] == self._host]
            # With ranks on other hosts, those miss the stopped ones of this host.
            self._pids = local if len(local) == len(ranks) else []
            self._announce()
            self.peers.start()

    def stop(self) -> None:
        """Called when this rank has ended by itself."""
        self._stop.set()
        self.peers.stop()
        self._tell({"end": True})
        assert self._monitor.stdin is not None
        with suppress(OSError, subprocess.TimeoutExpired):
            self._monitor.stdin.close()
            self._monitor.wait(END_S)
        faulthandler.unregister(signal.SIGUSR2)
        faulthandler.disable()
        self._stacks.close()

    def failed(self, error: BaseException) -> dict[str, Any]:
        """Writes what this rank was doing when an exception ended it; returns facts for the record
        of the failure."""
        sight = self._sight("failed", stacks.listed(traceback.walk_tb(error.__traceback__))[::-1])
        sights.write(self.attempt.path, sight)
        return {key: sight[key] for key in ("step", "enqueued") if sight.get(key) is not None}

    def _report_straggler(self, verdict: Slowdown) -> None:
        log.warning("%s", verdict.sentence)
        slow = {"host": verdict.host, "share": verdict.excess_ms / verdict.step_ms}
        slow = slow if verdict.host else {}
        # The thread that tells the other ranks how this one is does not wait for the disk.
        within(0.0, lambda: self.attempt.update(straggler=verdict.sentence, slow=slow))

    def _watch(self) -> None:
        self._used = _used_by_others()
        while not self._stop.wait(TICK):
            now = time.monotonic()
            used = _used_by_others()
            if now - self._looked > AWAY:
                self._progress += now - self._looked
                self.peers.paused(now - self._looked)
            before = self.peers.pulse
            works = not before["in_step"] and used - self._used > BUSY * (now - self._looked)
            stack = self._stack()
            self.heartbeat.look(stack)
            if (done := self.heartbeat.progress) != self._done or works:
                if before["in_step"] and before["limit"]:
                    self._longest = max(self._longest, now - self._progress)
                self._done = done
                self._progress = now
            self._looked = now
            self._used = used
            self._look_after_store(now)
            pulse = self._announce(stack)
            limit = pulse["limit"]
            late = limit is not None and pulse["age"] > limit and not self.peers.excuse(limit)
            if ((late and not self.store.silent) or self.peers.hang) and not self._stop.is_set():
                self._hang()

    def _look_after_store(self, now: float) -> None:
        """While the store of the run's folder does not answer, no time counts."""
        if now - self._progress < SOON and not self.store.silent:
            return  # it is not asked while the rank makes progress
        lost = self.store.ask()
        self._progress = min(now, self._progress + lost)
        told = self._away > TELL_S
        self._away = self.store.silent or self._away
        run = self.attempt.path.parents[1]
        if not told and self._away > TELL_S:
            self._tell_user(
                f"the store of {run} has not answered for {self._away:.0f} s. The run waits, and "
                "goes on when it does; no process is ended for that time"
            )
        if not self.store.silent:
            if told:
                self._tell_user(f"the store of {run} answers again, after {self._away:.0f} s")
            self._away = 0.0

    def _tell_user(self, what: str) -> None:
        """Not by the log, which is a file of the store. The screen may be one as well."""
        if self.environment.local_rank == 0:
            within(0.0, lambda: os.write(2, f"distdl: {what}\n".encode()))

    def _announce(self, stack: Sequence[Frame] = ()) -> dict[str, Any]:
        """Tells the monitor and the other ranks what this rank is doing."""
        self.peers.pulse = pulse = self._pulse(stack)
        self._tell(pulse)
        return pulse

    def _pulse(self, stack: Sequence[Frame] = ()) -> dict[str, Any]:
        """What this rank is doing, or was doing in an earlier stack of its main thread."""
        self._number += 1
        environment = self.environment
        stack = stack or self._stack()
        self.heartbeat.look(stack)
        age = round(time.monotonic() - self._progress, 1)
        files = [file for file, _, _ in stack]
        in_step = self.heartbeat.in_step and not any(map(COMPILERS.search, files))
        waits = age > SOON and bool(self._waits_for(stack))
        # Once it trains, a rank that waits needs no longer limit: those that it waits for excuse
        # it, unless they cannot be reached any more.
        short = in_step or (waits and self.heartbeat.count > 0)
        return {
            "rank": environment.rank,
            "host": self._host,
            "pid": os.getpid(),
            "world_size": environment.world_size,
            "local_world_size": environment.local_world_size,
            "time": time.time(),
            "age": age,
            "number": self._number,
            "pids": self._pids,
            "in_step": in_step,
            "limit": None if self.store.away else self._limit(short, files),
            "waits": waits,
            "where": innermost(stack),
            **self.heartbeat.facts(),
        }

    def _waits_for(self, stack: Sequence[Frame]) -> list[flight.StartedCollective]:
        """The collectives that this rank waits in, the oldest first."""
        if not any(flight.waits_in(file, int(line)) for file, line, _ in stack[:1]):
            return []  # those that it has started are under way while it does something else
        return [each for each in flight.collectives() if not each.completed]

    def _stack(self) -> list[Frame]:
        """That of the main thread, the innermost frame first."""
        return self._main_thread.read()

    def _limit(self, short: bool, files: Sequence[str]) -> float | None:
        """Seconds without progress until this rank hangs; None: none. `short`: the limit of a step.
        `files` are those of the main thread's frames."""
        heartbeat = self.heartbeat
        if heartbeat.phase == PREPARE or any(map(DEBUGGERS.search, files[:INNERMOST])):
            return None
        if not short:
            return max(LONG_S, self.timeout or 0)
        if self.timeout or heartbeat.count < STEPS or heartbeat.phase > OPTIMIZER:
            return self.timeout or STEP_S
        return max(FLOOR_S, FACTOR * self._longest)

    def _tell(self, message: Mapping[str, Any]) -> None:
        assert self._monitor.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            os.write(self._monitor.stdin.fileno(), json.dumps(message).encode() + b"\n")

    def _hang(self) -> None:
        """Writes what this rank is doing, and ends it."""
        self.peers.hang = True
        pulse = self._pulse()
        self._tell({**pulse, "limit": pulse["age"] + REPORT_S})  # the monitor acts after that
        sight = self._sight("hang")
        # Python 3.11 may end here (see ThreadStack); the monitor reports what it was told then.
        faulthandler.dump_traceback(self._stacks)
        sight["workers"] = [*self._workers()]
        dump = os.pread(self._stacks.fileno(), 1 << 20, 0).decode(errors="replace")
        within(WRITE_S, lambda: self._record_hang(sight, dump))
        if self.environment.world_size > 1:
            time.sleep(OTHERS_S)
        alone = self.environment.world_size == 1
        within(WRITE_S, lambda: sights.conclude(self.attempt.path, sight, alone))
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
        os._exit(EXIT_HUNG)

    def _record_hang(self, sight: Mapping[str, Any], dump: str) -> None:
        sights.write(self.attempt.path, sight, dump)
        what = f"no progress for {sight['age']:.0f} s in {sight['phase']}"
        sights.record_hang(self.attempt.path, sight, what, dump)
        if not sight["collective"]:
            where = f" at {sight['where']}" if sight["where"] else ""
            log.error("%s%s; the stacks are in health/stacks_%d.txt", what, where, sight["rank"])

    def _sight(self, how: str, stack: Sequence[Frame] = ()) -> dict[str, Any]:
        """All that is known of this rank now, or in an earlier stack of its main thread."""
        started = flight.collectives()
        waits = self._waits_for(stack or self._stack())
        within(LOOK_S, self.store.look)
        return {
            **self._pulse(stack),
            "how": how,
            **self.peers.facts(),
            **machine.facts(os.getpid(), self.store.free, self._kills),
            "enqueued": started[-1].number if started else None,
            "collective": waits[-1].describe() if waits else None,
            "last": started[-1].describe() if started else None,
        }

    def _workers(self) -> Iterator[dict[str, Any]]:
        """This rank's loader workers, each with the user's line in which it is."""
        for child in psutil.Process().children():
            if child.pid == self._monitor.pid or not _handles(child.pid, signal.SIGUSR2):
                continue
            process = {"pid": child.pid, **machine.state(child.pid)}
            if process["process"] in STOPPED:  # it answers no signal
                yield process
                continue
            self._stacks.write(f"\nloader worker, process {child.pid}\n".encode())
            begin = os.fstat(self._stacks.fileno()).st_size
            os.kill(child.pid, signal.SIGUSR2)
            for _ in range(20):
                time.sleep(0.02)
                size = os.fstat(self._stacks.fileno()).st_size
                if size > begin:
                    break
            text = os.pread(self._stacks.fileno(), size - begin, begin).decode(errors="replace")
            yield {**process, "where": innermost(main_thread(text))}


def _used_by_others() -> float:
    """Seconds of processor time that all threads of this process but the calling one have used."""
    return time.process_time() - time.thread_time()


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    with suppress(OSError, ValueError, IndexError):
        caught = (
            Path(f"/proc/{pid}/status")
            .read_text(encoding="utf-8")
            .partition("SigCgt:")[2]
            .split()[0]
        )
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False
