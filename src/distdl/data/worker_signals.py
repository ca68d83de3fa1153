"""Makes a loader's workers survive the signals that end a job, so that it can save its state."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from distdl.util.orphans import die_with_parent

PATIENCE = 60  # seconds that a worker lives after a SIGTERM from an unknown sender (macOS)


@dataclass
class Surviving:
    """A `worker_init_fn` for DataLoader that wraps the user's own.

    Slurm, Azure ML and `timeout` signal every process of a job. If a worker died, its rank would
    fail in the middle of a step, before it writes the checkpoint. So a worker ignores the signal,
    unless its own rank sent it: when a script ends while a loader is alive, multiprocessing
    terminates the workers and waits for them.
    """

    then: Callable[[int], None] | None = None

    def __call__(self, worker_id: int) -> None:
        die_with_parent()  # torch's own check waits for the end of the sample
        for number in (signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, "sigwaitinfo"):
            # Blocked here and in all later threads, so that only the waiting thread receives it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_with_rank, name="sigterm", daemon=True).start()
        else:
            signal.signal(signal.SIGTERM, _stay)
        if self.then is not None:
            self.then(worker_id)


def _end_with_rank() -> None:
    rank = os.getppid()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)  # like torch's workers (torch/csrc/DataLoader.cpp, handler_SIGTERM)


def _stay(number: int, frame: FrameType | None) -> None:
    signal.alarm(PATIENCE)
