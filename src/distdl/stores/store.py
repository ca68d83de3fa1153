"""What every store can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

PATIENCE = 120.0  # seconds that a store keeps trying to reach a server that does not answer

# Called with the number of bytes received or sent since the last call, from any thread.
Progress = Callable[[int], None]


class StoreError(OSError):
    """A file could not be read or written; the message names it, without any secret.

    Args:
        message: Which file of which store, and what the server said.
        transient: The server did not answer, or was busy: the same may succeed later.
        remedy: For what the message says of credentials, the container or the bucket; else "".
    """

    def __init__(self, message: str, *, transient: bool = False, remedy: str = "") -> None:
        super().__init__(message)
        self.transient, self.remedy = transient, remedy


class Absent(StoreError):
    """There is no such file; its container is there."""


class Store(Protocol):
    """A folder of files, somewhere.

    What cannot be done raises StoreError, after retries where the cause may pass (`PATIENCE`).
    """

    @property
    def uri(self) -> str:
        """Where it is, to be printed: without a signature."""
        ...

    @property
    def address(self) -> str:
        """The full address: with the account or endpoint that `uri` may leave to the environment,
        and without a signature."""
        ...

    def size(self, name: str) -> int | None:
        """In bytes; None: there is no such file."""
        ...

    def read(self, name: str) -> bytes:
        """All of a small file."""
        ...

    def download(self, name: str, to: Path, progress: Progress | None = None) -> None:
        """Writes a file to `to`, which is replaced; ranges come in parallel.

        Not atomic: give a temporary name, check what came, and rename it. On disk when it returns
        (fsync). A full disk raises plain OSError (ENOSPC).
        """
        ...

    def upload(self, path: Path, name: str, progress: Progress | None = None) -> None:
        """Stores a file completely or not at all; never replaces one that is there (StoreError).

        What arrives is checked on the way (MD5 or CRC of each part, by the server).
        """
        ...

    def names(self, prefix: str = "") -> Iterator[str]:
        """Of all files, also in folders below, whose name starts so; sorted."""
        ...
