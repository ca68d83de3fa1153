"""What a program prints: to its rank's log and to the rank's own output, without secrets."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from distdl.util.redact import redact

READ = 1 << 16  # bytes per read
LONGEST = 1 << 18  # bytes of text that waits for the end of its line
PATIENCE_S = 2.0  # a process that the program left may keep the pipe open
KEPT = 200  # of the last lines
BEGIN, END = b"-----BEGIN", b"-----END"


class Output:
    """A pipe for a program's stdout and stderr, in which the two keep their order. A thread copies
    it in complete lines, so that no secret is cut in two; the lines of a key, from BEGIN to END,
    are kept together."""

    def __init__(self, log: Path) -> None:
        self._file = open(log, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        self._reading, self.writing = os.pipe()
        self._pending = b""
        self.last: deque[str] = deque(maxlen=KEPT)
        self._thread = threading.Thread(target=self._pump, name="output", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """The program has its end of the pipe; this process closes its own."""
        os.close(self.writing)

    def close(self) -> None:
        """Waits for what is left in the pipe, once the program has ended."""
        self._thread.join(PATIENCE_S)
        with contextlib.suppress(OSError):
            self._file.close()

    def tail(self) -> Sequence[str]:
        """The last lines."""
        return [*self.last]

    def _pump(self) -> None:
        with open(self._reading, "rb", buffering=0) as pipe:
            while data := pipe.read(READ):
                self._pending += data
                self._write(self._complete())
        self._write(len(self._pending))

    def _complete(self) -> int:
        """Bytes up to the end of the last line; a progress bar ends its lines by a return."""
        if len(self._pending) > LONGEST:
            return len(self._pending)
        complete = max(self._pending.rfind(b"\n"), self._pending.rfind(b"\r")) + 1
        key = self._pending.rfind(BEGIN)
        if key >= 0 and END not in self._pending[key:]:
            complete = min(complete, self._pending.rfind(b"\n", 0, key) + 1)
        return complete

    def _write(self, count: int) -> None:
        text = self._pending[:count].decode(errors="replace")
        self._pending = self._pending[count:]
        if not text:
            return
        shown = redact(text)
        self.last.extend(line for line in shown.splitlines() if line.strip())
        data = shown.encode(errors="replace")
        # A full disk, or a reader that has gone, loses lines; nothing else reads the pipe, and a
        # program that prints into a full one waits for ever.
        for write in (self._file.write, _to_stdout):
            with contextlib.suppress(OSError, ValueError):
                write(data)


def _to_stdout(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(1, data) :]
        except BlockingIOError:  # a terminal may be set so by another program
            time.sleep(0.01)
