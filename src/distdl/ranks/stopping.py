"""Signals that end an attempt: a rank records one at once, and all ranks stop at the same step.

Lightning's own SIGTERM handler broadcasts from inside the handler, and deadlocks if the ranks are
at different steps (pytorch-lightning#20806). Here a handler only sets a flag, which callbacks read
at step boundaries.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from distdl.job import JobState
from distdl.util import helpers

# The state after each signal. Slurm (--signal=USR1@60) and mpirun can send SIGUSR1 before the end;
# closing a terminal sends SIGHUP.
STATE_AFTER = {
    signal.SIGTERM: JobState.PREEMPTED,
    signal.SIGUSR1: JobState.PREEMPTED,
    signal.SIGHUP: JobState.PREEMPTED,
    signal.SIGINT: JobState.CANCELLED,
}


def signals() -> list[signal.Signals]:
    """The signals that this process handles; under `nohup` not SIGHUP."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STATE_AFTER if not (nohup and number is signal.SIGHUP)]


def state_after_exit(code: int) -> JobState:
    """The final state of a process by its exit code, which is -N if signal N ended it before the
    process had installed its handler."""
    if code < 0:
        return next((s for n, s in STATE_AFTER.items() if n == -code), JobState.FAILED)
    agreed = (JobState.SUCCEEDED, JobState.PREEMPTED, JobState.CANCELLED)
    return next((state for state in agreed if state.exit_code == code), JobState.FAILED)


class Ended(KeyboardInterrupt):
    """A signal asked a command to end; a KeyboardInterrupt, so that cleanup runs as for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def state(self) -> JobState:
        return STATE_AFTER[signal.Signals(self.number)]


def signal_number(interrupt: KeyboardInterrupt) -> int:
    return interrupt.number if isinstance(interrupt, Ended) else signal.SIGINT


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """While a command prepares a run, makes a signal that asks to end raise `Ended`; by default it
    would leave a recorded attempt without a process. A worker and torch's agent replace these
    handlers with their own while they run."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    interrupt = {signal.SIGINT: signal.getsignal(signal.SIGINT)}  # raises KeyboardInterrupt already
    kept = set_handlers(dict.fromkeys(signals(), end) | interrupt)
    try:
        yield
    finally:
        set_handlers(kept)


def set_handlers(handlers: Mapping[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Sets handlers and returns the previous ones; does nothing outside the main thread. None,
    which is no handler of Python's, is left out."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {n: signal.signal(n, new) for n, new in handlers.items() if new is not None}


@contextmanager
def deferred() -> Iterator[None]:
    """Calls the handlers of signals that come meanwhile at the end: for steps between which none
    may raise, such as to start a process and to note that it has started.

    To block the signals in this thread would not do: another thread of the process, such as one of
    torch's store, then takes them, and Python calls the handler here all the same.
    """
    came: list[int] = []
    kept = set_handlers(dict.fromkeys(signals(), lambda number, frame: came.append(number)))
    try:
        yield
    finally:
        set_handlers(kept)
        for number in came:
            signal.raise_signal(number)


class Stopped(Exception):
    """Ends the attempt on all ranks; the training state is saved if there is one."""

    def __init__(self, state: JobState, message: str) -> None:
        super().__init__(message)
        self.state = state


class StopRequest:
    """Whether this process was asked to end, and by which signal."""

    def __init__(self) -> None:
        self.state: JobState | None = None
        self.signal: str = ""
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.state is not None

    def install(self) -> None:
        """Installs the handlers; before slow work, so that no signal is lost during set-up."""
        self._previous |= set_handlers(dict.fromkeys({*signals()} - {*self._previous}, self._note))
        helpers.let_come()  # those that came while whoever started this process held them back

    def uninstall(self) -> None:
        set_handlers(self._previous)
        self._previous = {}

    def ask(self, state: JobState, why: str) -> None:
        """Asks to end as a signal does, with `why` in place of its name."""
        self.state = state
        self.signal = why

    def check(self) -> None:
        """Raises `Stopped` if asked to end. Only before training may a rank stop on its own."""
        if self.state is not None:
            raise Stopped(self.state, f"{self.signal} before training began")

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C ends the process at once.
        if number == signal.SIGINT and self.state is not None:
            raise KeyboardInterrupt
        self.state = STATE_AFTER[signal.Signals(number)]
        self.signal = signal.Signals(number).name
