"""What the kernel knows of a process: its state, its memory, the space on its disks.

Standard library only: the monitor uses it too. Unknown values are None or "", as on macOS.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

GROUPS = Path("/sys/fs/cgroup")


def state(pid: int) -> dict[str, str]:
    """The state letter of a process (T: stopped), and the kernel's function that it waits in.
    Source: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html"""
    folder = Path(f"/proc/{pid}")
    with suppress(OSError, IndexError):
        letter = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        waits_in = ""
        with suppress(OSError):
            waits_in = (folder / "wchan").read_text().strip("0")
        return {"process": letter, "wchan": waits_in}
    return {"process": "", "wchan": ""}


def memory(pid: int) -> dict[str, int | None]:
    """Bytes: of the process, and the limit and use of its control group (version 2), in which
    `oom_kills` processes were killed so far; what the machine has available."""
    found: dict[str, int | None] = dict.fromkeys(
        ("rss", "limit", "used", "available", "oom_kills"), None
    )
    with suppress(OSError, ValueError):
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        found["rss"] = int(pages) * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        values = dict(line.split(":") for line in lines)
        found["available"] = int(values["MemAvailable"].split()[0]) * 1024
    if group := control_group(pid):
        with suppress(OSError, ValueError):
            found["used"] = int((group / "memory.current").read_text())
            events = dict(map(str.split, (group / "memory.events").read_text().splitlines()))
            found["oom_kills"] = int(events["oom_kill"])
            found["limit"] = int((group / "memory.max").read_text())  # or "max"
    return found


def control_group(pid: int) -> Path | None:
    """The folder of a process's control group; None if version 2 is not mounted.
    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html"""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                folder = GROUPS / line[3:].lstrip("/")
                return folder if (folder / "memory.current").exists() else None
    return None


def disk(run: Path) -> dict[str, int]:
    """Free bytes of the run's disk, of /dev/shm and of /tmp."""
    free = {}
    for name, path in (("run", run), ("/dev/shm", Path("/dev/shm")), ("/tmp", Path("/tmp"))):
        with suppress(OSError):
            free[name] = shutil.disk_usage(path).free
    return free


def facts(pid: int, run: Path, kills: int = 0) -> dict[str, Any]:
    """All of the above, as a sight has it; without the first `kills` of the control group."""
    used = memory(pid)
    used["oom_kills"] = (used["oom_kills"] or kills) - kills
    return {**state(pid), "memory": used, "disk": disk(run)}


def oom_kills(pid: int) -> int:
    return memory(pid)["oom_kills"] or 0
