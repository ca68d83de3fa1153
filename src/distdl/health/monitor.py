"""Watches one rank from outside: `python monitor.py`, which the rank's watchdog starts.

It sees what a rank cannot report itself: a signal stopped it, C code never lets go of Python's
lock, the kernel killed it. It reads a line of JSON per pulse from its standard input, and imports
nothing but the standard library until something is wrong.
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
AWAY = 5.0  # a longer time without a look: this process, or the machine, was stopped
STACKS_S = 0.5  # for the rank to write its stacks


def main() -> None:
    """Returns when the rank has ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # those of the job, which the rank handles
    # Unbuffered: the next line is read by its number.
    hello = json.loads(open(0, "rb", 0, closefd=False).readline() or b'{"end": true}')  # noqa: SIM115
    if not hello.get("end"):
        Monitor(hello).run()


class Monitor:
    """`hello` has the rank's number and pid, the open files of its stacks and of its heartbeat,
    sys.path, the attempt's folder, and the limit of a step."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self.hello, self.pid, self.rank = hello, int(hello["pid"]), int(hello["rank"])
        self.attempt = Path(hello["attempt"])
        sys.path[:] = hello["path"]
        self.stacks, self.heartbeat = hello["files"]
        self.pulse: dict[str, Any] = {"rank": self.rank, "limit": None, "age": 0.0}
        self.seen = self.looked = time.monotonic()
        from distdl.health import machine

        self.machine = machine
        self.kills = machine.oom_kills(self.pid)
        self.facts = machine.facts(self.pid, self.attempt)

    def run(self) -> None:
        rest = b""
        while True:
            ready, _, _ = select.select([0], [], [], TICK)
            now = time.monotonic()
            if now - self.looked > AWAY:
                self.seen += now - self.looked
            self.looked = now
            data = os.read(0, 1 << 20) if ready else b""
            *lines, rest = (rest + data).split(b"\n")
            if lines:
                self.pulse, self.seen = json.loads(lines[-1]), now
            if self.pulse.get("end"):
                return
            if (ready and not data) or os.getppid() != self.pid:
                return self.write("died")
            self.facts = self.machine.facts(self.pid, self.attempt)
            ranks = [self.machine.state(pid)["process"] for pid in self.pulse.get("pids") or ()]
            age, limit = self.pulse["age"] + now - self.seen, self.pulse["limit"]
            stopped = self.facts["process"] == "T"
            if ranks and all(state in ("T", "t") for state in ranks):  # by Ctrl-Z
                self.seen = now
            elif stopped and "" in ranks:  # the others have ended
                return self.end_rank(age)
            elif stopped and limit is not None:
                limit = self.hello["limit"]
            if limit is not None and now - self.seen > GRACE and age > limit + GRACE:
                return self.end_rank(age)

    def end_rank(self, age: float) -> None:
        """Records why, and ends the rank."""
        from distdl.health import sights

        stopped = self.facts["process"] == "T"
        what = "was stopped by a signal" if stopped else "does not answer: C code holds Python"
        if not stopped:
            os.kill(self.pid, signal.SIGUSR2)
            time.sleep(STACKS_S)
        self.pulse["age"] = age
        self.write("hang")
        sights.record_hang(self.attempt, self.pulse, f"{what}; no progress for {age:.0f} s")
        os.kill(self.pid, signal.SIGKILL)
        sights.conclude(self.attempt, self.pulse, alone=self.hello["alone"])

    def write(self, how: str) -> None:
        """Writes the sight of a rank that did not do so itself."""
        from distdl.config.own_code import innermost, main_thread
        from distdl.health import flight, heartbeat, sights

        last = heartbeat.read(self.heartbeat)
        if {**self.pulse, **last} != self.pulse:  # it did more since its last pulse
            self.pulse = {**self.pulse, **last, "where": "", "samples": None}
        stacks = os.pread(self.stacks, 1 << 20, 0).decode(errors="replace")
        main = main_thread(stacks)
        self.pulse["where"] = where = innermost(main) or self.pulse.get("where", "")
        # Where ranks make different calls, gloo aborts one of them.
        aborted = "Fatal Python error: Aborted" in stacks
        if aborted and main and flight.waits_in(main[0][0], int(main[0][1])):
            how = "aborted"
            self.pulse["collective"] = {"op": "a collective", "where": where}
        self.facts["memory"]["oom_kills"] = self.machine.oom_kills(os.getpid()) - self.kills
        sights.write(self.attempt, {**self.pulse, **self.facts, "how": how}, stacks)


if __name__ == "__main__":
    main()
