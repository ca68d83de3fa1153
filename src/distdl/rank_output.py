"""What a node's ranks print: the first one's to the terminal, the others' to files, redacted.

A rank's log passes a filter in the rank itself (`redact.RedactingFilter`); what it, or a library in
C below it, simply prints does not. So the files are written here, in the process that starts the
ranks: what one said last is not lost if it is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import threading
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from distdl.redact import redact

READ, LONGEST = 1 << 16, 1 << 18  # bytes: at a time, and of a text that is held back
BEGIN, END = b"-----BEGIN", b"-----END"


class RankOutput:
    """A pipe for each stream of each rank but the node's first, and a thread that empties them.

    Args:
        folder: Where torch's agent makes a folder for each rank.
        devices: Ranks of this node.
    """

    def __init__(self, folder: Path, devices: int) -> None:
        redirected = dict.fromkeys(range(1, devices), Std.ALL)
        self.specs = Specs(str(folder), redirected, self._pipe_to)
        self._selector = selectors.DefaultSelector()
        self._ends: list[int] = []
        self._wake, self._woken = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._pump, name="rank output", daemon=True)

    def __enter__(self) -> RankOutput:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._woken, b".")
        self._thread.join()
        for end in (*self._ends, self._wake, self._woken):
            os.close(end)

    def _pipe_to(self, path: str) -> str:
        """Makes a pipe into a file; returns the name under which torch can open it."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._ends += [reading, writing]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        stream = Stream(open(path, "wb", buffering=0))  # noqa: SIM115 - closed by its `end`
        self._selector.register(reading, selectors.EVENT_READ, stream)
        return f"/dev/fd/{writing}"

    def _pump(self) -> None:
        going = True
        while going:
            ready = self._selector.select()
            going = all(key.data is not None for key, _ in ready)
            for key, _ in ready:
                if key.data is not None:
                    key.data.add(_read(key.fd))
        # The ranks have ended; what they have written is in the pipes.
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                while data := _read(key.fd):
                    key.data.add(data)
                key.data.end()
        self._selector.close()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, READ)
    except BlockingIOError:
        return b""


class Stream:
    """One file, written line by line: a secret is not to be cut in two, nor a key of many lines."""

    def __init__(self, file: BinaryIO | Any) -> None:
        self.file, self.held = file, b""

    def add(self, data: bytes) -> None:
        self.held += data
        whole = self.held.rfind(b"\n") + 1
        key = self.held.rfind(BEGIN)
        if key >= 0 and END not in self.held[key:]:
            whole = min(whole, self.held.rfind(b"\n", 0, key) + 1)
        if len(self.held) > LONGEST:
            whole = len(self.held)
        self._write(whole)

    def end(self) -> None:
        self._write(len(self.held))
        self.file.close()

    def _write(self, count: int) -> None:
        text, self.held = self.held[:count], self.held[count:]
        if text:
            # The disk may be full. That loses lines, and must not lose the thread: nobody else
            # empties the pipes, and a rank that prints into a full one waits for ever.
            with contextlib.suppress(OSError):
                self.file.write(redact(text.decode(errors="replace")).encode())


class Specs(DefaultLogsSpecs):
    """torch's folders, with pipes in the place of their files."""

    def __init__(self, folder: str, redirects: dict[int, Std], pipe_to: Any) -> None:
        super().__init__(log_dir=folder, redirects=redirects)
        self._pipe_to = pipe_to

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        found = super().reify(envs)
        out, err = self._piped(found.stdouts), self._piped(found.stderrs)
        return dataclasses.replace(found, stdouts=out, stderrs=err)

    def _piped(self, paths: dict[int, str]) -> dict[int, str]:
        return {rank: path and self._pipe_to(path) for rank, path in paths.items()}
