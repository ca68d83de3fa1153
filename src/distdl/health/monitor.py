"""Watches one rank from outside: `python monitor.py`, which the rank's watchdog starts.

It sees what a rank cannot report itself: a signal stopped it, C code never lets go of Python's
lock, the kernel killed it. It reads a line of JSON per pulse from its standard input, and imports
little until something is wrong.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

TICK = 0.5  # seconds between two looks
GRACE = 1.5  # seconds in which the rank's own watchdog acts first
STACKS_S = 0.5  # for the rank to write its stacks


def main() -> None:
    """Returns when the rank has ended."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)  # those of the job, which the rank handles
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    # Unbuffered: the next line is read by its number.
    if hello := open(0, "rb", 0, closefd=False).readline():  # noqa: SIM115
        Monitor(json.loads(hello)).run()


class Monitor:
    """`hello` has the rank's number and pid, the open files of its stacks and of its heartbeat,
    sys.path, the attempt's folder, and the limit of a step."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self.hello = hello
        self.pid = int(hello["pid"])
        self.attempt = Path(hello["attempt"])
        sys.path[:] = hello["path"]
        from distdl.health import machine
        from distdl.health.store import RunStore
        from distdl.incident.words import STOPPED

        self.machine = machine
        self.kills = machine.oom_kills(self.pid)
        self.is_stopped = STOPPED
        self.store = RunStore(self.attempt)
        self.facts = machine.facts(self.pid, {})
        self.pulse: dict[str, Any] = {"rank": hello["rank"], "limit": None, "age": 0.0}

    def run(self) -> None:
        rest = b""
        silent = 0.0
        looked = time.monotonic()
        while True:
            ready, _, _ = select.select([0], [], [], TICK)
            now = time.monotonic()
            # If more time has passed, this process, or the machine, was stopped.
            silent += min(now - looked, 2 * TICK)
            looked = now
            data = os.read(0, 1 << 20) if ready else b""
            *lines, rest = (rest + data).split(b"\n")
            if lines:
                self.pulse = json.loads(lines[-1])
                silent = 0.0
            if self.pulse.get("end"):
                return
            if (ready and not data) or os.getppid() != self.pid:
                return self.write("died")
            self.store.ask()
            self.facts = self.machine.facts(self.pid, self.store.free)
            ranks = [self.machine.state(pid)["process"] for pid in self.pulse.get("pids") or ()]
            stopped = self.facts["process"] in self.is_stopped
            by_ctrl_z = ranks and all(state in self.is_stopped for state in ranks)
            if by_ctrl_z or self.store.away:
                silent = 0.0
            age = self.pulse["age"] + silent
            limit = self.pulse["limit"]
            if stopped and limit is not None:  # perhaps in a step that began after its last pulse
                limit = self.hello["limit"]
            late = limit is not None and silent > GRACE and age > limit + GRACE
            if late or (stopped and "" in ranks):  # the others have ended
                return self.end_rank(age, stopped)

    def end_rank(self, age: float, stopped: bool) -> None:
        """Records why, and ends the rank."""
        from distdl.health import store
        from distdl.incident import sights

        what = "was stopped by a signal" if stopped else "does not answer: C code holds Python"
        if not stopped:
            os.kill(self.pid, signal.SIGUSR2)
            time.sleep(STACKS_S)
        self.pulse["age"] = age

        def record() -> None:
            self.write("hang")
            sights.record_hang(self.attempt, self.pulse, f"{what}; no progress for {age:.0f} s")

        store.within(store.WRITE_S, record)
        os.kill(self.pid, signal.SIGKILL)
        sights.conclude(self.attempt, self.pulse, alone=self.hello["alone"])

    def write(self, how: str) -> None:
        """Writes the sight of a rank that did not do so itself."""
        from distdl.config.own_code import innermost, main_thread
        from distdl.health import flight, heartbeat
        from distdl.incident import sights

        stacks_file, heartbeat_file = self.hello["files"]
        last = heartbeat.read(heartbeat_file)
        if last.get("step", -1) > self.pulse.get("step", -1):  # it did more since its last pulse
            unknown = {"where": "", "phase": "", "action": "", "samples": None}
            self.pulse = {**self.pulse, **last, **unknown}
        stacks = os.pread(stacks_file, 1 << 20, 0).decode(errors="replace")
        if main := main_thread(stacks):
            phase, self.pulse["action"], _ = heartbeat.seen_in(main)
            outside = heartbeat.END if last else heartbeat.SET_UP
            self.pulse["phase"] = heartbeat.PHASES[outside if phase is None else phase]
        self.pulse["where"] = where = innermost(main) or self.pulse.get("where", "")
        # Where ranks make different calls, gloo aborts one of them.
        aborted = "Fatal Python error: Aborted" in stacks
        if aborted and main and flight.waits_in(main[0][0], int(main[0][1])):
            how = "aborted"
            self.pulse["collective"] = {"op": "a collective", "where": where}
        self.facts["memory"]["oom_kills"] = self.machine.oom_kills(os.getpid(), self.kills)
        sights.write(self.attempt, {**self.pulse, **self.facts, "how": how}, stacks)


if __name__ == "__main__":
    main()
