"""Supervises one mpirun in the background: `python supervisor.py ATTEMPT_FOLDER`.

It records how mpirun ended in the attempt's `mpirun.json`. `jobs cancel` signals this process. The
file is run by its path, and imports only modules of distdl that need the standard library alone.

- On SIGINT (a cancel), SIGTERM or SIGUSR1 (a preemption) it sends SIGUSR1 to mpirun. All flavours
  forward that signal to the ranks, which then write a checkpoint. After `grace_seconds` mpirun is
  interrupted, then killed. (SIGTERM itself is not forwarded: Open MPI then kills the ranks within a
  second, and with a longer `odls_base_sigkill_timeout` every failure takes four times that timeout.
  So mpirun never sees a SIGTERM, which a platform may send to every process of this machine.)
- The ssh script records a host whose connection is lost. Open MPI then ends by itself, but hydra,
  the process manager of MPICH and Intel MPI, does not. So mpirun is killed, and its proxies on the
  other hosts end with it.
- If a host can no longer reach this one, hydra's proxy there would wait until TCP gives up. So each
  rank's parent holds a connection to the supervisor's port, and ends its rank when the supervisor's
  host stops answering (see rank.py).
- When mpirun has ended, every process that it left running on this machine is killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from distdl.util.atomic_files import write_bytes
from distdl.util.exit_codes import EXIT_FAILURE, EXIT_NOT_STARTED, as_shell
from distdl.util.processes import SET_CHILD_SUBREAPER, SET_PARENT_DEATH_SIGNAL, prctl, start_time

RECORD, LOST, LOG = "mpirun.json", "mpirun.lost", "logs/mpirun.log"
PORT = "DISTDL_KEEPER_PORT"
MOST_RANKS = 4096  # Linux's limit for pending connections
RANK_END = re.compile(
    r"distdl: rank (?P<rank>\d+) on (?P<host>\S+) ended with (?P<how>exit code|signal) "
    r"(?P<number>\d+)(: (?P<type>[\w.]+): (?P<message>.*))?"
)
# Seconds that mpirun gets to end by itself after a host is lost, or after a signal.
LOST_SECONDS, TERM_SECONDS = 8.0, 10.0

# Each step: a signal for mpirun (or none), and the seconds to wait before the next step.
Steps = Iterator[tuple[signal.Signals | None, float]]


class Supervisor:
    """Runs one mpirun and records how it ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: dict[str, Any] = json.loads((folder / RECORD).read_text())
        self.cancelled = self.preempted = self.ending = False

    def run(self) -> None:
        prctl(SET_CHILD_SUBREAPER, 1)  # mpirun's orphans become children of this process
        signal.signal(signal.SIGINT, self._on_cancel)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_preemption)
        # Not SIG_IGN: mpirun and the ranks would inherit it.
        signal.signal(signal.SIGHUP, lambda *_: None)
        self.write(pid=os.getpid(), birth=start_time(os.getpid()), started=time.time())
        listener = listen()  # stays open until this process ends
        try:
            mpirun = subprocess.Popen(
                self.record["command"],
                stdin=subprocess.DEVNULL,
                preexec_fn=outlive_signals,
                env={PORT: str(listener.getsockname()[1]), **os.environ},
            )
        except OSError as error:
            print(f"distdl: {error}", file=sys.stderr)
            self.write(exit_code=EXIT_NOT_STARTED, ended=time.time())
            return
        code = self.watch(mpirun)
        remove_orphans()
        killed = ""
        if code < 0 and not self.ending:  # the ranks died with mpirun, so none of them is the cause
            killed = f"mpirun was killed by {signal.Signals(-code).name} on {socket.gethostname()}"
        elif code and not (self.cancelled or self.preempted):
            self.record_cause()
        self.write(
            exit_code=as_shell(code),
            killed=killed,
            cancelled=self.cancelled,
            preempted=self.preempted,
            ended=time.time(),
        )

    def _on_cancel(self, *_: object) -> None:
        self.cancelled = True

    def _on_preemption(self, *_: object) -> None:
        self.preempted = True

    def watch(self, mpirun: subprocess.Popen[bytes]) -> int:
        """Waits for mpirun. After a cancel or the loss of a host, also takes steps to end it."""
        steps: Steps | None = None
        lost = False
        deadline = 0.0
        cancel = [(signal.SIGUSR1, float(self.record["grace_seconds"]))]
        cancel.append((signal.SIGINT, TERM_SECONDS))
        kill = repeat((signal.SIGKILL, TERM_SECONDS))
        while mpirun.poll() is None:
            if not lost and (self.folder / LOST).exists():
                lost = True
                steps = chain([(None, LOST_SECONDS)], kill)
                deadline = 0.0
            elif (self.cancelled or self.preempted) and steps is None:
                steps = chain(cancel, kill)
                deadline = 0.0
            if steps is not None and time.monotonic() >= deadline:
                number, seconds = next(steps)
                if number is not None:
                    self.ending = True
                    mpirun.send_signal(number)
                deadline = time.monotonic() + seconds
            time.sleep(0.1)
        return mpirun.wait()

    def record_cause(self) -> None:
        """Records the error of the rank that ended the job, unless the rank has recorded it. A rank
        cannot do so if it was killed or its host vanished, or if its store is on another host."""
        if not (first := self.first_report() or self.host_loss()):
            return
        file = self.folder / "errors" / f"rank_{first['rank']}.json"
        others = [json.loads(other.read_text()) for other in file.parent.glob("rank_*.json")]
        # An agent ends with its first failed rank's exit code, and that rank's record is the cause.
        same = [all(e.get(key) == first[key] for key in ("host", "exit_code")) for e in others]
        if file.exists() or (self.record["agent"] and any(same)):
            return
        # Errors that others recorded earlier (a broken connection) are consequences of this one.
        first["time"] = min([time.time(), *(other["time"] - 0.001 for other in others)])
        write_json(file, {**first, "traceback": ""})

    def first_report(self) -> dict[str, Any] | None:
        """The first report of a rank's end in the log; rank.py writes these lines."""
        first = RANK_END.search((self.folder / LOG).read_text(errors="replace"))
        if first is None:
            return None
        by_signal = first["how"] == "signal"
        number = int(first["number"])
        message = f"ended with {first['how']} {number} on {first['host']}"
        if by_signal:
            message = f"killed by {signal.Signals(number).name} on {first['host']}"
            if number == signal.SIGKILL:
                message += " (out of memory? see dmesg there)"
        if self.record["agent"]:
            message = f"a rank of this host, or its agent: {message}"
        return {
            "rank": int(first["rank"]) * self.record["ranks_per_process"],
            "host": first["host"],
            "type": first["type"] or ("Killed" if by_signal else "Ended"),
            "message": first["message"] or message,
            "exit_code": as_shell(-number) if by_signal else number,
        }

    def host_loss(self) -> dict[str, Any] | None:
        """The first host whose connection was lost."""
        lost = (self.folder / LOST).read_text().split() if (self.folder / LOST).exists() else []
        if not lost:
            return None
        word = lost[0]
        hosts = self.record["hosts"]  # our name of each host, by mpirun's word for it
        host = hosts.get(word, word)
        return {
            "rank": [*hosts].index(word) * self.record["ranks_per_host"] if word in hosts else 0,
            "host": host,
            "type": "HostLost",
            "message": f"{host} does not answer any more: its ssh connection was lost",
            "exit_code": EXIT_FAILURE,
        }

    def write(self, **fields: object) -> None:
        self.record |= fields
        write_json(self.folder / RECORD, self.record)


def outlive_signals() -> None:
    """Called in mpirun's process before it begins. rank.py lets them come again."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGINT)


def listen() -> socket.socket:
    """A listening socket. Nothing is accepted: the kernel answers while this host is reachable."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=MOST_RANKS, dualstack_ipv6=both)


def remove_orphans(seconds: float = 3.0) -> None:
    """Gives the processes that mpirun left behind time to end, then kills them."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    deadline = time.monotonic() + seconds
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > deadline:
            for pid in children.read_text(encoding="utf-8").split() if children.exists() else []:
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline + seconds:
            return
        time.sleep(0.05)


def write_json(file: Path, value: dict[str, Any]) -> None:
    write_bytes(file, f"{json.dumps(value, indent=2)}\n".encode(), durable=False)


if __name__ == "__main__":
    Supervisor(Path(sys.argv[1])).run()
