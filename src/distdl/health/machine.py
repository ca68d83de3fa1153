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
VERSION_2 = ("memory.current", "memory.max", "memory.events")
VERSION_1 = ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control")
NO_LIMIT = 2**62  # of version 1


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
    """Bytes: of the process, and the limit and use of its control group, in which `oom_kills`
    processes were killed so far; what the machine has available."""
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
    if files := control_group(pid):
        with suppress(OSError, ValueError):
            used, limit, events = (file.read_text() for file in files)
            found["used"] = int(used)
            found["oom_kills"] = int(dict(map(str.split, events.splitlines()))["oom_kill"])
            found["limit"] = value if (value := int(limit)) < NO_LIMIT else None  # or "max"
    return found


def control_group(pid: int) -> list[Path] | None:
    """The files with the memory use, limit and events of a process's control group.
    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, and cgroup-v1/memory.html"""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            version_1 = "memory" in controllers.split(",")
            if not version_1 and number != "0":
                continue
            top = GROUPS / "memory" if version_1 else GROUPS
            for folder in (top / path.lstrip("/"), top):  # the path may be the host's
                files = [folder / name for name in (VERSION_1 if version_1 else VERSION_2)]
                if files[0].exists():
                    return files
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
