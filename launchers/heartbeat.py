"""A heartbeat between a job's hosts: each sends a line per second, and finally how it ended.

In collective operations ranks wait for each other for up to half an hour. The heartbeat shows much
earlier that a host has failed or vanished. The other hosts connect to the primary host. Both sides
of a connection send lines: `beat`, or `end` with a HostEnd as JSON.

Where a platform replaces single hosts (Kubernetes), the hosts first gather: the primary host waits
for all of them, and then sends each the line `start` with the number of this start. Whoever comes
later is sent away, and tries again: the primary host that it met is about to be replaced as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Sequence

PORT = 29400
BEAT_SECONDS = 1.0
PATIENCE_SECONDS = 15.0  # of silence, after which a host counts as vanished
CONNECT_SECONDS = 900.0  # long, because hosts pull their image and inputs at different speeds
VANISHED = -1  # used instead of an exit code


@dataclasses.dataclass(frozen=True)
class HostEnd:
    """How a host ended."""

    code: int  # its exit code, or VANISHED
    why: str = ""  # the first cause, as far as that host knows; empty if there was no failure
    # The time of that cause; 0 for a host that vanished, which precedes the failures it causes.
    time: float = 0.0


class Heartbeat:
    """Sends this host's heartbeat to the other hosts, and receives theirs. `names` has all hosts;
    the first is the primary host, which listens on the port. A single host does nothing."""

    def __init__(
        self,
        names: Sequence[str],
        current: str,
        port: int = PORT,
        *,
        address: str = "",
        gathers: bool = False,
        number: int = 0,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        """`address`: where the primary host listens; it raises an OSError if it cannot. With
        `gathers`, `gathered` is set once all hosts have come; `number` is then that of this start,
        which the primary host knows."""
        self.names = names
        self.current = current
        self.primary = names[0]
        self.port = port
        self.gathers = gathers
        self.number = number
        self.connect_seconds = connect_seconds
        self.came: set[str] = set()  # the hosts that the primary host waits with
        self.gathered = threading.Event()
        if not gathers or len(names) == 1:
            self.gathered.set()
        self._ends: dict[str, HostEnd] = {}
        self.links: list[socket.socket] = []
        self.waiting: list[socket.socket] = []  # of hosts that have come, until all have
        self._lock = threading.Lock()
        self._over = threading.Event()
        if len(names) == 1:
            return
        main = self._connect
        if current == self.primary:
            # Here, and not in the thread, where nobody would see that the port is taken.
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            place = (address, port)
            self._server = socket.create_server(place, family=family, backlog=len(names))
            main = self._listen
        threading.Thread(target=main, daemon=True).start()

    def ends(self) -> dict[str, HostEnd]:
        """Name -> how the host ended, for all hosts that have ended."""
        with self._lock:
            return dict(self._ends)

    def report_end(self, end: HostEnd) -> None:
        """Reports to the other hosts how this host has ended."""
        self._over.set()
        line = f"end {json.dumps(dataclasses.asdict(end))}\n".encode()
        with self._lock:
            for link in self.links:
                with contextlib.suppress(OSError):
                    link.sendall(line)
                    link.shutdown(socket.SHUT_WR)

    def _listen(self) -> None:
        while True:
            link, _ = self._server.accept()
            threading.Thread(target=self._greet, args=(link,), daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        """Reads which host has connected, and disconnects any other client (a port scanner)."""
        link.settimeout(PATIENCE_SECONDS)
        reader = link.makefile("r")
        with contextlib.suppress(OSError, ValueError):
            word, _, name = reader.readline().strip().partition(" ")
            if word == "host" and name in self.names[1:] and self._take(link, name):
                self._talk(link, name)
                return
        link.close()

    def _take(self, link: socket.socket, name: str) -> bool:
        """Whether a host takes part in this start. The last one that comes starts it."""
        with self._lock:
            if not self.gathers:
                return True
            if self.gathered.is_set() or name in self.came:
                return False
            self.came.add(name)
            self.waiting.append(link)
            if len(self.came) == len(self.names) - 1:
                for each in self.waiting:
                    with contextlib.suppress(OSError):  # its end is noted where it is read
                        each.sendall(f"start {self.number}\n".encode())
                self.gathered.set()
        return True

    def _connect(self) -> None:
        deadline = time.monotonic() + self.connect_seconds
        while not self._over.is_set():
            try:
                link = socket.create_connection((self.primary, self.port), PATIENCE_SECONDS)
            except OSError:
                if time.monotonic() > deadline:
                    self._note(self.primary, HostEnd(VANISHED, f"{self.primary} never answered"))
                    return
                time.sleep(BEAT_SECONDS)
                continue
            with contextlib.suppress(OSError):
                link.sendall(f"host {self.current}\n".encode())
            self._talk(link, self.primary)
            if self.gathered.is_set():
                return
            time.sleep(BEAT_SECONDS)  # sent away, or the primary host is gone

    def _talk(self, link: socket.socket, name: str) -> None:
        """Sends the heartbeat in a thread, and reads until the other host has ended."""
        link.settimeout(PATIENCE_SECONDS)
        with self._lock:
            self.links.append(link)
        threading.Thread(target=self._beat, args=(link,), daemon=True).start()
        end = HostEnd(VANISHED, f"{name} vanished")
        rest = b""
        with contextlib.suppress(OSError, ValueError, TypeError):
            while new := link.recv(1024):
                *lines, rest = (rest + new).split(b"\n")
                for line in lines:
                    word, _, text = line.partition(b" ")
                    if word == b"end":
                        end = HostEnd(**json.loads(text))
                    elif word == b"start" and name == self.primary:
                        self.number = int(text)
                        self.gathered.set()
        with self._lock:
            if not self.gathered.is_set():  # the host may come again
                self.links.remove(link)
                self.came.discard(name)
                self.waiting = [each for each in self.waiting if each is not link]
                link.close()
                return
        self._note(name, end)

    def _beat(self, link: socket.socket) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with self._lock:
                try:
                    link.sendall(b"beat\n")
                except OSError:
                    return

    def _note(self, name: str, end: HostEnd) -> None:
        with self._lock:
            self._ends.setdefault(name, end)
