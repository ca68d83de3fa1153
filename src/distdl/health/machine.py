"""What the kernel knows of a process: its state, its memory, the space on its disks.

The monitor uses it too, so it imports little. A value that the kernel does not tell is left out.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

GROUPS = Path("/sys/fs/cgroup")
VERSION_2 = ("memory.current", "memory.max", "memory.events")  # use, limit, events
VERSION_1 = ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control")
# The controllers of a hierarchy in /proc/PID/cgroup, its folder, and its files.
HIERARCHIES = {"": (GROUPS, VERSION_2), "memory": (GROUPS / "memory", VERSION_1)}
NO_LIMIT = 2**62  # of version 1


def state(pid: int) -> dict[str, str]:
    """The state of a process (psutil's word for it; "" if it has ended), and the kernel's function
    that it waits in (on Linux)."""
    process = waits_in = ""
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid).status()
        waits_in = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8").strip("0")
    return {"process": process, "wchan": waits_in}


def memory(pid: int) -> dict[str, int]:
    """Bytes: of the process, and the limit and use of its control group, in which `oom_kills`
    processes were killed so far; what the machine has available."""
    values = {"available": psutil.virtual_memory().available}
    with suppress(psutil.Error):
        values["rss"] = psutil.Process(pid).memory_info().rss
    with suppress(OSError, ValueError, KeyError):
        used, limit, events = (file.read_text() for file in control_group(pid))
        values["used"] = int(used)
        values["oom_kills"] = int(dict(map(str.split, events.splitlines()))["oom_kill"])
        if int(limit) < NO_LIMIT:  # or it is "max"
            values["limit"] = int(limit)
    return values


def control_group(pid: int) -> list[Path]:
    """The files with the memory use, limit and events of a process's control group.
    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, and cgroup-v1/memory.html"""
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        top, names = HIERARCHIES.get(controllers, (GROUPS, ()))
        for folder in (top / path.lstrip("/"), top):  # the path may be the host's
            if files := [folder / name for name in names if (folder / name).exists()]:
                return files
    return []


def disk(run: Path) -> dict[str, int]:
    """Free bytes of the run's disk, of /dev/shm and of /tmp."""
    free = {}
    for name, path in {"run": str(run), "/dev/shm": "/dev/shm", "/tmp": "/tmp"}.items():
        with suppress(OSError):
            free[name] = psutil.disk_usage(path).free
    return free


def facts(pid: int, free: dict[str, int], kills: int = 0) -> dict[str, Any]:
    """All of the above, as a sight has it; without the first `kills` of the control group. `free`
    is from `disk`, which a store that hangs blocks."""
    used = memory(pid)
    used["oom_kills"] = _since(used.get("oom_kills", kills), kills)
    return {**state(pid), "memory": used, "disk": free}


def oom_kills(pid: int, before: int = 0) -> int:
    """How many processes of its control group were killed, without the first `before`."""
    return _since(memory(pid).get("oom_kills", 0), before)


def _since(kills: int, before: int) -> int:
    # Fewer than before: it was moved into another group, whose kills are all new to it.
    return kills - before if kills >= before else kills
