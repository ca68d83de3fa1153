"""What a rank and its loader workers need of a machine: folders, shared memory, open files. Without
it a helper thread fails in the middle of the training; so it is checked before the start."""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distdl.util.errors import Problem, UserError

# A worker's socket is TMPDIR/pymp-xxxxxxxx/listener-xxxxxxxx; a socket's path has 107 bytes.
LONGEST = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
SHARED = Path("/dev/shm")
# Open files of a rank, and of each of its loader workers: pipes, and the batches under way.
RANK_FILES = 64
WORKER_FILES = 16


def refuse(data: Mapping[str, Any] | None, ranks: int) -> None:
    """Refuses a machine on which so many ranks cannot load `data`, the config's section.

    Raises:
        UserError: With all problems.
    """
    if found := [*problems(data, ranks)]:
        raise UserError(*found)


def problems(data: Mapping[str, Any] | None, ranks: int) -> Iterator[Problem]:
    """What this machine lacks for loader workers; `data` and `ranks` as in `refuse`."""
    workers = (data or {}).get("num_workers")
    folder, name = folder_for_files()
    yield from _unusable(folder, name)
    if workers == 0:
        return
    length = len(os.fsencode(folder))
    if length > LONGEST:
        yield Problem(
            path=name,
            what=(
                f"{folder} has {length} characters, and the sockets of loader workers, which are "
                f"in it, allow {LONGEST}"
            ),
            remedy="export TMPDIR=/tmp; or data.num_workers=0",
            code="out-of-range",
        )
    yield from _shared_memory(needed_bytes(data, ranks))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = RANK_FILES + WORKER_FILES * (workers if isinstance(workers, int) else 1)
    if files not in (resource.RLIM_INFINITY, -1) and files < needed:
        yield Problem(
            "ulimit -n",
            what=f"a process may open {files} files; a rank with its loader workers needs {needed}",
            remedy=f"ulimit -n {max(4096, needed)}; or fewer data.num_workers",
            code="not-enough",
        )


def folder_for_files() -> tuple[str, str]:
    """The folder for temporary files, and the variable that names it. Python would take another
    folder in silence if it cannot be used."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        if value := os.environ.get(name):
            return os.path.abspath(value), name
    return tempfile.gettempdir(), "TMPDIR"


def needed_bytes(data: Mapping[str, Any] | None, ranks: int) -> int:
    """Bytes of shared memory for the batches in the loaders' queues; 0 if their size is unknown."""
    size, workers, batch = (
        (data or {}).get(k) for k in ("image_size", "num_workers", "batch_size")
    )
    if not (isinstance(size, int) and isinstance(workers, int) and isinstance(batch, int)):
        return 0
    return ranks * (2 * workers + 1) * batch * 3 * size**2 if workers else 0


def _unusable(folder: str, name: str) -> Iterator[Problem]:
    if not os.path.isdir(folder):
        yield Problem(
            name, what=f"there is no folder {folder}", remedy="export TMPDIR=/tmp", code="not-found"
        )
        return
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        yield Problem(
            name,
            what=f"{folder} cannot be written: {error.strerror}",
            remedy="make room there, or name another: export TMPDIR=/tmp",
            code="not-writable",
        )


def _shared_memory(needed: int) -> Iterator[Problem]:
    if not SHARED.is_dir():
        return
    if not os.access(SHARED, os.W_OK):
        yield Problem(
            str(SHARED),
            what="cannot be written, and loader workers pass their batches through it",
            remedy=f"chmod 1777 {SHARED}; or data.num_workers=0",
            code="not-writable",
        )
    elif (size := shutil.disk_usage(SHARED).total) < needed:
        gigabytes = math.ceil(needed / 2**30)
        yield Problem(
            str(SHARED),
            what=f"has {size / 2**20:.0f} MiB; the loaders' batches need {needed / 2**20:.0f}",
            remedy=f"docker run --shm-size={gigabytes}g; or fewer data.num_workers",
            code="not-enough",
        )
