"""A loader's workers outlive the signals that end a job, so that the job can end in order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

PATIENCE = 60  # seconds a worker stays after a SIGTERM where the sender is unknown (macOS)


@dataclass
class Surviving:
    """A `worker_init_fn` for DataLoader, around the user's own.

    Slurm, Azure ML and `timeout` signal every process of a job. A worker that died of it would
    take its rank down in the middle of a step, before the checkpoint is written. So it stays,
    unless its rank itself sent the signal: when a script ends with a loader that is still alive,
    multiprocessing terminates its workers and waits for them.
    """

    then: Callable[[int], None] | None = None

    def __call__(self, worker_id: int) -> None:
        for number in (signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, "sigwaitinfo"):
            # Blocked here, and so in all threads that follow, it is left to the one that waits.
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
    os._exit(0)  # as torch's own workers do (torch/csrc/DataLoader.cpp, handler_SIGTERM)


def _stay(number: int, frame: FrameType | None) -> None:
    signal.alarm(PATIENCE)
