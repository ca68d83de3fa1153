"""Signals that end an attempt: noted at once, acted on by all ranks at the same step.

Lightning's own SIGTERM handler broadcasts from inside the handler and deadlocks when the ranks are
at different steps (pytorch-lightning#20806). Here a handler only sets a flag; callbacks ask for it
at step boundaries.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from distdl.job import JobState

# SIGUSR1 is what Slurm (--signal=USR1@60) and mpirun can send before the end.
MEANING = {
    signal.SIGTERM: JobState.PREEMPTED,
    signal.SIGUSR1: JobState.PREEMPTED,
    signal.SIGINT: JobState.CANCELLED,
}


class Stopped(Exception):
    """The attempt ends here, on all ranks, with its state saved as far as there was one."""

    def __init__(self, state: JobState, message: str) -> None:
        super().__init__(message)
        self.state = state


class StopRequest:
    """Whether this process was asked to end, and by what."""

    def __init__(self) -> None:
        self.state: JobState | None = None
        self.signal: str = ""
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.state is not None

    def install(self) -> None:
        """Before anything slow, so that a signal during set-up is not lost."""
        if threading.current_thread() is threading.main_thread():
            for number in MEANING:
                self._before[number] = signal.signal(number, self._note)

    def uninstall(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def check(self) -> None:
        """Ends here if asked to. For places where this rank stands alone, before training."""
        if self.state is not None:
            raise Stopped(self.state, f"{self.signal} before training began")

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C means now.
        if number == signal.SIGINT and self.state is not None:
            raise KeyboardInterrupt
        self.state = MEANING[signal.Signals(number)]
        self.signal = signal.Signals(number).name
