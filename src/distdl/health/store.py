"""Whether the run's folder answers.

A store that hangs blocks each thread that touches it, in the kernel and for as long as it takes. So
those that guard a rank ask a thread that may be blocked.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from distdl.health import machine

AWAY_S = 2.0  # seconds without an answer; from then on no time counts
LOOK_S = 1.0  # a longer time without a look: this process was stopped
WRITE_S = 5.0  # for what is written about a failure


class RunStore:
    """The store of a run's folder, of which one thread asks, in the background.

    Args:
        folder: Of the attempt.
        file: A file in it whose time is changed, to see whether it can be written; None: none.
    """

    def __init__(self, folder: Path, file: Path | None = None) -> None:
        self.folder = folder
        self.file = file
        self.free: dict[str, int] = {}  # bytes, as `machine.disk` has them
        self.silent = 0.0  # seconds for which the last question has had no answer
        self._looked = time.monotonic()
        self._asks = threading.Event()
        threading.Thread(target=self._answer, name="store", daemon=True).start()

    @property
    def away(self) -> bool:
        return self.silent > AWAY_S

    def ask(self) -> float:
        """Asks again once the last question is answered. Returns for how many seconds more it has
        had no answer, which do not count: 0 if it answers."""
        now = time.monotonic()
        before = self.silent
        passed = min(now - self._looked, LOOK_S)
        self._looked = now
        if not self._asks.is_set():
            self.silent = 0.0
            self._asks.set()
            return 0.0
        self.silent += passed
        if not self.away:
            return 0.0
        return passed if before > AWAY_S else self.silent

    def look(self) -> None:
        self.free = machine.disk(self.folder)

    def _answer(self) -> None:
        while self._asks.wait():
            self.look()
            if self.file is not None:
                with suppress(OSError):  # that is an answer too, and the rank itself will meet it
                    os.utime(self.file)
            self._asks.clear()


def within(seconds: float, act: Callable[[], object]) -> bool:
    """Does something that touches the store, in a thread that may be blocked longer than that.
    Returns whether it was done in time."""
    thread = threading.Thread(target=act, name="report", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
