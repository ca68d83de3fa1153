"""How fast the files of a data set are read on this machine, at random and in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SECONDS = 0.5  # of each measurement, at most
PIECE = 8 << 20  # bytes that are read at a time, in order


class Extent(NamedTuple):
    """A part of a file."""

    path: Path
    offset: int
    bytes: int


def at_random(places: Sequence[Extent], readers: int) -> tuple[float, list[bytes]]:
    """Places per second, and what was read of them.

    They are read by so many threads at once, as by a loader's workers, and come from the storage
    itself: they are dropped from the page cache before, where the system does that.
    """
    handles = {place.path: os.open(place.path, os.O_RDONLY) for place in places}
    try:
        for place in places:
            _forget(handles[place.path], place.offset, place.bytes)
        read: list[bytes] = []
        waiting = list(reversed(places))
        began = time.perf_counter()

        def work() -> None:
            while waiting and time.perf_counter() - began < SECONDS:
                with suppress(IndexError):  # another thread took the last one
                    place = waiting.pop()
                    read.append(os.pread(handles[place.path], place.bytes, place.offset))

        threads = [threading.Thread(target=work) for _ in range(readers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(read) / max(time.perf_counter() - began, 1e-9), read
    finally:
        for handle in handles.values():
            os.close(handle)


def in_order(paths: Sequence[Path]) -> float:
    """Bytes per second of these files, from the storage."""
    read = 0
    spent = 0.0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            _forget(file.fileno(), 0, 0)
            began = time.perf_counter()
            count = 1
            while count and spent + time.perf_counter() - began < SECONDS:
                count = len(file.read(PIECE))
                read += count
            spent += time.perf_counter() - began
    return read / max(spent, 1e-9)


def _forget(handle: int, offset: int, count: int) -> None:
    """Drops a part of a file from the page cache; a count of 0 means up to its end."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(handle, offset, count, os.POSIX_FADV_DONTNEED)
