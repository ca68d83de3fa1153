"""The interface of every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

PATIENCE = 120.0  # seconds that a store keeps trying to reach a server that does not answer

# Called with the number of bytes received or sent since the last call, from any thread.
Progress = Callable[[int], None]


class Store(Protocol):
    """A folder of files in some backend.

    A method that fails raises StoreError; transient errors are retried first (`PATIENCE`).
    """

    @property
    def uri(self) -> str:
        """Its location, for messages: without a signature."""
        ...

    @property
    def address(self) -> str:
        """`uri` with the account or endpoint, which the URI need not name."""
        ...

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None: there is no such file."""
        ...

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        ...

    def read_part(self, name: str, start: int, count: int) -> bytes:
        """`count` bytes of a file from `start` on, which it must have."""
        ...

    def download(self, name: str, to: Path, progress: Progress | None = None) -> None:
        """Downloads a file to `to`, which is overwritten, with parallel range requests.

        It is not atomic: pass a temporary name, check the result, and rename it. The data is
        flushed to disk (fsync). A full disk raises plain OSError (ENOSPC).
        """
        ...

    def upload(self, path: Path, name: str, progress: Progress | None = None) -> None:
        """Stores a file completely or not at all; never replaces an existing one (StoreError).

        The server checks what arrives (MD5 or CRC of each part).
        """
        ...

    def replace(self, path: Path, name: str) -> None:
        """The same, but replaces an existing one: for files that grow or change."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file; one that is not there is no error."""
        ...

    def names(self, prefix: str = "") -> Iterator[str]:
        """Sorted names of all files that start with `prefix`, also in subfolders."""
        ...
