"""Waiting for what takes no trial now: a platform that refuses, a disk that is full or away."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from distdl.runs.directory import shown
from distdl.util.errors import UserError
from distdl.util.screen import escaped, say

PATIENCE_S = 300.0
LONGEST_S = 30.0  # between two tries
PROBE = ".tune.probe"  # a file in the study's folder
PROBE_SIZE = 1 << 20  # bytes, as a small run needs


class Patience:
    """Since when no trial could be started, and when it is tried again."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._next = 0.0

    @property
    def waits(self) -> bool:
        return self._since is not None

    @property
    def is_early(self) -> bool:
        return self.waits and time.monotonic() < self._next

    def wait(self, error: UserError) -> None:
        """Raises the error, if it has been so for minutes."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            problem = error.problems[0]
            say(escaped(f"note    {problem.path} {problem.what}: trying again"))
        waited = now - self._since
        if waited > PATIENCE_S:
            raise error
        self._next = now + min(LONGEST_S, max(1.0, waited))

    def end(self) -> None:
        self._since = None


def unwritable(folder: Path, error: OSError) -> UserError:
    return UserError.at(
        shown(folder), what=f"cannot be written ({error.strerror or error})", code="not-writable"
    )


def try_store(folder: Path) -> None:
    """Raises an OSError if a study's folder cannot be written: any trial would fail."""
    file = folder / PROBE
    try:
        file.write_bytes(bytes(PROBE_SIZE))
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def store_fails(folder: Path) -> bool:
    try:
        try_store(folder)
    except OSError:
        return True
    return False
