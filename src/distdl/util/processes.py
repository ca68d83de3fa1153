"""Whether a process still runs, and is not a later one with the same number; and prctl.

Standard library only: mpirun's supervisor, which is started by its path, uses it too.
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
    """Sets an attribute of this process, on Linux only. Safe between fork and exec."""
    if LIBC is not None:
        LIBC.prctl(option, value)


def start_time(pid: int) -> str:
    """The start time of a process as `<boot>/<ticks since then>`, unique together with the number.
    Empty if the process has ended (zombies included), or if there is no /proc. Source:
    https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html, field 22"""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (
            "" if fields[0] == "Z" else f"{BOOT.read_text(encoding='utf-8').strip()}/{fields[19]}"
        )
    except (OSError, IndexError):
        return ""


def is_alive(pid: int, started: str | None = None) -> bool:
    """Whether a process runs; if a start time was recorded, with this start time."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    if not Path("/proc/self/stat").exists():  # not Linux
        return True
    actual = start_time(pid)
    return bool(actual) and (not started or actual == started)


def this_process() -> dict[str, Any]:
    """Identifies this process in a record, even if a later process has the same number."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "birth": start_time(pid)}
