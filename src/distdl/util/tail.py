"""Follows a text file that another process writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distdl.util.errors import UserError


def tail(path: Path, alive: Callable[[], bool], interval: float = 0.2) -> Iterator[str]:
    """Lines of a growing file, without line ends, until it is no longer `alive`. The file need not
    exist yet, and is read every `interval` seconds. A link, which no run writes, is a UserError."""
    if path.is_symlink():  # a run's folder may come from somebody else
        raise UserError.at(
            str(path), what=f"is a link to {path.readlink()}, and is not shown", code="wrong-kind"
        )
    position = 0
    rest = b""
    while True:
        last_look = not alive()  # before each read, so that the last lines are read
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                new = file.read()
            position += len(new)
            *lines, rest = (rest + new).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace").rstrip("\r")
        if last_look:
            if rest:
                yield rest.decode(errors="replace")
            return
        time.sleep(interval)


def plain(value: object) -> str:
    """Text of a file without control characters for the terminal."""
    return "".join(c for c in str(value) if c.isprintable() or c in "\n\t")
