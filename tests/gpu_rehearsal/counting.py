"""What the simulated runtime counted from one optimizer step to the next."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

Counts = dict[str, int]


class Counting:
    """steps[k - 1]: counts from the end of optimizer step k to the end of step k + 1.

    So it holds what follows step k (reports, checkpoints) and all of step k + 1.
    """

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._read = ctypes.CDLL(None).rehearsal_counter
        self._read.restype = ctypes.c_char_p
        self._before: Counts | None = None
        self.steps: list[Counts] = []
        register_optimizer_step_post_hook(self._stepped)

    def clear(self) -> None:
        self._before, self.steps = None, []

    def _stepped(self, *_: Any) -> None:
        now, before = self.now(), self._before
        if before is not None:
            self.steps.append({name: now[name] - before[name] for name in now})
        self._before = now

    def now(self) -> Counts:
        return dict(self._counters())

    def _counters(self) -> Iterator[tuple[str, int]]:
        value, index = ctypes.c_long(), 0
        while name := self._read(index, ctypes.byref(value)):
            yield name.decode(), value.value
            index += 1
