"""The output of a node's ranks: the first rank's to the terminal, the others' to files, redacted.

A rank redacts its log, but not the text that Python or C code prints directly. So the process that
starts the ranks redacts and writes this text. The last lines of a killed rank are not lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from distdl.ranks import stopping
from distdl.util.redact import redact

READ = 1 << 16  # bytes per read
LONGEST = 1 << 18  # bytes of text that waits for the end of its line
PATIENCE = 2.0  # seconds; a process that a rank started may keep the pipe open
BEGIN, END = b"-----BEGIN", b"-----END"


class RankOutput:
    """A pipe for stdout and for stderr of each rank but the node's first. A thread reads each pipe
    and writes a file, in the folder that torch's agent creates for the rank inside `folder`."""

    def __init__(self, folder: Path, devices: int) -> None:
        redirected = dict.fromkeys(range(1, devices), Std.ALL)
        self.specs = Specs(str(folder), redirected, self.pipe_to)
        self._ends: list[int] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> RankOutput:
        return self

    def __exit__(self, *_: object) -> None:
        """Reads the output that is left in the pipes after the ranks have ended."""
        for end in self._ends:
            os.close(end)
        deadline = time.monotonic() + PATIENCE
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))

    def pipe_to(self, path: str) -> str:
        """Opens a pipe whose output goes to the file; returns the name by which torch opens it.

        A signal's handler may raise between any two steps: it waits until `__exit__` knows of this
        pipe and its thread.
        """
        with stopping.deferred():
            reading, writing = os.pipe()
            self._ends.append(writing)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            stream = Stream(open(path, "wb", buffering=0))  # noqa: SIM115 - closed by its `end`
            thread = threading.Thread(target=pump, args=(reading, stream), daemon=True)
            thread.start()
            self._threads.append(thread)
        return f"/dev/fd/{writing}"


def pump(reading: int, stream: Stream) -> None:
    """Copies a pipe to a stream until all writers have closed the pipe."""
    with open(reading, "rb", buffering=0) as pipe:
        while data := pipe.read(READ):
            stream.add(data)
    stream.end()


class Writes(Protocol):
    """What is used of a file that is open for bytes."""

    def write(self, data: bytes, /) -> object: ...

    def close(self) -> None: ...


class Stream:
    """One file, redacted and written in complete lines, so that no secret is cut in two. The lines
    of a key (from BEGIN to END) are written together."""

    def __init__(self, file: Writes) -> None:
        self.file = file
        self.pending = b""

    def add(self, data: bytes) -> None:
        self.pending += data
        complete = self.pending.rfind(b"\n") + 1
        key = self.pending.rfind(BEGIN)
        if key >= 0 and END not in self.pending[key:]:
            complete = min(complete, self.pending.rfind(b"\n", 0, key) + 1)
        if len(self.pending) > LONGEST:
            complete = len(self.pending)
        self._write(complete)

    def end(self) -> None:
        self._write(len(self.pending))
        self.file.close()

    def _write(self, count: int) -> None:
        text = self.pending[:count]
        self.pending = self.pending[count:]
        if text:
            # A full disk loses lines, but must not end the thread: nothing else reads the pipe,
            # and a rank that prints into a full pipe waits for ever.
            with contextlib.suppress(OSError):
                self.file.write(redact(text.decode(errors="replace")).encode())


class Specs(DefaultLogsSpecs):
    """torch's folders for the output of ranks, with pipes instead of files."""

    def __init__(
        self, folder: str, redirects: dict[int, Std], pipe_to: Callable[[str], str]
    ) -> None:
        super().__init__(log_dir=folder, redirects=redirects)
        self._pipe_to = pipe_to

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        logs = super().reify(envs)
        out, err = self._piped(logs.stdouts), self._piped(logs.stderrs)
        return dataclasses.replace(logs, stdouts=out, stderrs=err)

    def _piped(self, paths: dict[int, str]) -> dict[int, str]:
        return {rank: path and self._pipe_to(path) for rank, path in paths.items()}
