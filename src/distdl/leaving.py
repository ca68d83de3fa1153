"""How a process ends so that whatever started it draws the right conclusion.

The truth about a run stands in status.json and errors/; an exit code must only not spoil it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from distdl.job import EXIT_CANCELLED, EXIT_PREEMPTED

AGREED = (EXIT_PREEMPTED, EXIT_CANCELLED)
# mpirun and `srun --kill-on-bad-exit` kill the other ranks at the first exit code but 0, also those
# that are still writing.
KILLS_OTHERS = ("mpi", "slurm")
LINGER = "DISTDL_LINGER_SECONDS"


def leave(code: int, launcher: str) -> NoReturn:
    """Ends this process.

    Args:
        code: What it would say to a shell.
        launcher: Who started it, as in DISTDL_LAUNCHER.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code == EXIT_PREEMPTED:
        # Azure ML starts a job again whose node was taken away, and not one that ended by itself.
        time.sleep(float(os.environ.get(LINGER, 0)))
    if code in AGREED and launcher in KILLS_OTHERS:
        code = 0
    # Threads of libraries must not hold up a rank that has ended: its peers wait for it.
    os._exit(code)
