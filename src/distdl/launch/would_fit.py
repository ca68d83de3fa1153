"""What would have fit, after a failure for lack of device memory: by the numbers of `plan`.

The tool that measures is started by name, as no training needs it, and in a process of its own: it
takes seconds, imports torch, and must not hold up the report, which is on the screen by then.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress

from distdl.incident import incident
from distdl.incident.causes import DEVICE_MEMORY
from distdl.runs.directory import Attempt
from distdl.util.errors import UserError
from distdl.util.screen import escaped

TOOL = "distdl.tools.measure.would_fit"
SECONDS = 60.0
# Of torch's message.
CAPACITY = re.compile(r"total capacity of ([\d.]+) ([GM])iB")
UNITS = {"G": 2**30, "M": 2**20}


def say(attempt: Attempt) -> None:
    """Prints what would have fit, and adds it to the report of the attempt. Does nothing after
    another failure, or where the memory of the device is not known."""
    report = incident.read(attempt)
    if report is None or report.cause != DEVICE_MEMORY:
        return
    capacity = CAPACITY.search(report.evidence)
    if capacity is None:
        return
    memory = float(capacity[1]) * UNITS[capacity[2]]
    lines = [escaped(line) for line in found_for(attempt, memory)]
    print("\n".join(lines), file=sys.stderr, flush=True)
    with suppress(OSError, UserError):
        attempt.update(would_fit=lines)
        incident.write(attempt)


def found_for(attempt: Attempt, memory: float) -> list[str]:
    """The lines to print."""
    request = {
        "run": str(attempt.path.parents[1]),
        "attempt": str(attempt.path),
        "memory": memory,
    }
    command = [sys.executable, "-P", "-m", TOOL]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            timeout=SECONDS,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        found = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return ["what would fit could not be measured here: distdl plan ... --device-memory GIB"]
    title = f"a step takes {found['now']}, by the numbers of distdl plan"
    if not found["instead"]:
        return [f"{title}; docs/memory.md says what to try"]
    rows = [f"  {words} ({taken})" for words, taken in found["instead"]]
    return [f"{title}. This would fit, for example with distdl resume:", *rows]
