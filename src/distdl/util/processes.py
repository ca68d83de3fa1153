"""Whether a process is still there: that one, and not a later one with its number; prctl.

Standard library only: mpirun's supervisor, which starts by its path, uses it too.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from pathlib import Path
from typing import Any

BOOT = Path("/proc/sys/kernel/random/boot_id")
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def prctl(option: int, value: int) -> None:
    """Sets an attribute of this process on Linux; elsewhere nothing. Safe between fork and exec."""
    if LIBC is not None:
        LIBC.prctl(option, value)


def birth(pid: int) -> str:
    """When a process began, as `<boot>/<ticks since then>`: no other process has had both.

    Empty for one that has ended, also if nobody has waited for it yet, and where there is no /proc.

    Source: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html, field 22
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else f"{BOOT.read_text().strip()}/{fields[19]}"
    except (OSError, IndexError):
        return ""


def is_alive(pid: int, born: str | None = None) -> bool:
    """Whether there is such a process.

    Args:
        pid: Its number.
        born: Its birth, as it was recorded; None for a record without one: then the number decides.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    if not Path("/proc/self/stat").exists():  # not Linux
        return True
    actual = birth(pid)
    return bool(actual) and (not born or actual == born)


def this_process() -> dict[str, Any]:
    """Who writes a record, so that it can be told from a later process of the same number."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "birth": birth(pid)}
