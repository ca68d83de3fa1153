"""Ends what a program started, if its rank is killed: `python guard.py NAME`, which a rank starts.

A rank that is killed with -9 can end nothing itself, and the kernel ends only the program that it
started, not what that has started (torchrun's ranks, a shell's command). All of them carry NAME in
their environment. It uses only the standard library, and waits until its standard input ends.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

VARIABLE = "DISTDL_RANK_PROCESS"
PASSES = 3  # while they are ended, some may start others
DONE = b"."  # the rank has ended its program itself


def main(name: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if os.read(0, 1) == DONE:
        return
    for _ in range(PASSES):
        for pid in named(name):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def named(name: str) -> Iterator[int]:
    """The processes with this name in their environment."""
    entry = f"{VARIABLE}={name}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


if __name__ == "__main__":
    main(sys.argv[1])
