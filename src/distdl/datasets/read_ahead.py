"""Reads shards in order, into the system's page cache, before their samples are read at random."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from distdl.datasets.format import File

PIECE = 8 << 20  # bytes


class PageCache:
    """What `distdl.datasets.prefetch.Prefetch` fills if a folder is read in place, in windows: the
    memory in which the system keeps files. It is a `Cache` as far as `Prefetch` knows.

    Args:
        folder: Of the shards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = set[str]()

    def only(self, files: Sequence[File]) -> Sequence[File]:
        """`files`; all others count as no longer there."""
        self._read &= {file.name for file in files}
        return files

    def has(self, file: File) -> bool:
        return file.name in self._read

    def fetch(
        self,
        file: File,
        evictable: object = None,
        progress: Callable[[int], None] | None = None,
    ) -> Path:
        """Raises OSError if it cannot be read."""
        path = self.folder / file.name
        buffer = bytearray(PIECE)
        with path.open("rb", buffering=0) as source:
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while count := source.readinto(buffer):
                if progress is not None:
                    progress(count)
        self._read.add(file.name)
        return path
