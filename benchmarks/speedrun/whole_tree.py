"""Runs a command, and writes how much CPU time it and every process below it took.

    python -m benchmarks.speedrun.whole_tree SECONDS_FILE COMMAND...

What outlives the process that started it becomes a child of this one (Linux), which ends only after
all of them, so that no rank, worker or helper is left out.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


def main(typed: Sequence[str]) -> int:
    seconds, *command = typed
    if ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this system does not pass on orphaned processes: Linux does")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # A command of the terminal gets its own Ctrl-C; it ends its ranks itself, which is waited for.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
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
