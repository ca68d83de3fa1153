"""What the simulated runtime counted in each step of a training."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback

Counts = dict[str, int]


class Counting(Callback):
    """The first of the callbacks, for one training without accumulation.

    steps[k - 1]: counts of step k, of what follows it (reports, checkpoints) and of fetching the
    next batch.
    """

    def __init__(self) -> None:
        self._read = ctypes.CDLL(None).rehearsal_counter
        self._read.restype = ctypes.c_char_p
        self._before: Counts | None = None
        self.steps: list[Counts] = []
        if "REHEARSAL_TRACE" in os.environ:  # streamsync, devicesync or pageable
            faulthandler.register(signal.SIGUSR2, all_threads=False)

    def on_train_batch_start(self, *_: Any) -> None:
        now, before = dict(self._counters()), self._before
        if before is not None:
            self.steps.append({name: now[name] - before[name] for name in now})
        self._before = now

    def _counters(self) -> Iterator[tuple[str, int]]:
        value, index = ctypes.c_long(), 0
        while name := self._read(index, ctypes.byref(value)):
            yield name.decode(), value.value
            index += 1
