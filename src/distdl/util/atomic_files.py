"""Files that appear under their final name only when they are complete."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

ENDING = ".part"


@contextmanager
def atomic_file(path: Path, *, durable: bool = True, replace: bool = True) -> Iterator[BinaryIO]:
    """A file to write to, under a temporary name in the folder of `path`, which it creates.

    Several processes and threads, also on several hosts, may write the same file: each has its own
    temporary file, and the last to end wins. An error removes the temporary file.

    Args:
        durable: Wait until the bytes and the name are on the disk, to survive a power cut.
        replace: If False, an existing file is kept, and a FileExistsError raised.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{ENDING}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
        else:
            try:
                os.link(temporary, path)  # `rename` would replace a file
            except OSError as error:
                if isinstance(error, FileExistsError) or path.exists():
                    raise FileExistsError(str(path)) from None
                temporary.rename(path)  # a mount without links
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Writes a file completely or not at all: see `atomic_file`."""
    with atomic_file(path, durable=durable) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Waits until a file's bytes, or the names in a folder, are on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError:
        if not path.is_dir():  # some file systems (blobfuse) cannot sync a folder
            raise


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files of killed processes. No other process may be writing meanwhile."""
    for path in folder.rglob(f".*{ENDING}"):
        path.unlink()
