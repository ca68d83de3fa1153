"""Runs a command, and writes how much CPU time it and every process below it took.

    python -m benchmarks.speedrun.whole_tree SECONDS_FILE COMMAND...

What outlives the process that started it becomes a child of this one (Linux), which ends only after
all of them, so that no rank, worker or helper is left out.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from distdl.util.processes import SET_CHILD_SUBREAPER, SET_PARENT_DEATH_SIGNAL, prctl


def main(typed: Sequence[str]) -> int:
    seconds, *command = typed
    if sys.platform != "linux":
        raise OSError("this system does not pass on orphaned processes: Linux does")
    prctl(SET_CHILD_SUBREAPER, 1)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # A command of the terminal gets its own Ctrl-C; it ends its ranks itself, which is waited for.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)  # nothing trains on if who asked is killed
    code = process.wait()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    Path(seconds).write_text(f"{used.ru_utime + used.ru_stime:.2f}", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
