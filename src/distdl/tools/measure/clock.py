"""Where the time of a step goes, by the device's own clock and without stopping the device.

On a GPU a mark is a CUDA event in the queue. Marks are read after a window has ended, so that
nothing in a step waits for them. The time between two marks includes waiting.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from distdl.tools.measure import OTHER, PHASES

Moment: TypeAlias = float | torch.cuda.Event  # seconds; on a GPU an event in its queue


class DeviceClock:
    """Marks on a device's timeline."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Whether the device works through a queue, while the host already does something else.
        self.queues = device.type == "cuda"

    def mark(self) -> Moment:
        if not self.queues:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Moment, second: Moment) -> float:
        """Seconds. On a GPU only after `finish`."""
        if isinstance(first, torch.cuda.Event):
            assert isinstance(second, torch.cuda.Event)
            return first.elapsed_time(second) / 1000
        assert isinstance(second, float)
        return second - first

    def finish(self) -> float:
        """Waits until the device has finished its work; returns the host's time, in seconds."""
        if self.queues:
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()


# If the device is behind the host by less than this share of a step, it has no work in its queue.
CAUGHT_UP = 0.1


@dataclass
class Step:
    """Seconds of one optimizer step and of each of its phases, which add up to it.

    `host_paced`: seconds in phases at whose end the device had caught up with the host. There it
    waited for the host to start its work. 0 on a CPU, which has no queue.
    """

    seconds: float
    phases: dict[str, float]
    host_paced: float = 0.0


@dataclass(frozen=True)
class Mark:
    """A moment on the device's timeline, when the host set it, and the phase that starts there."""

    device: Moment
    host: float
    phase: str


@dataclass
class Timeline:
    """Records when each phase begins. Phases nest: the outer one's time excludes the inner one's.

    Phases are timed only after the first `open_window` or `step_done`, which opens a step.
    """

    clock: DeviceClock
    _open: list[str] = field(default_factory=list)
    _marks: list[Mark] = field(default_factory=list)
    _steps: list[list[Mark]] = field(default_factory=list)

    def begin(self, phase: str) -> None:
        self._open.append(phase)
        self._mark()

    def end(self) -> None:
        if self._open:  # not if a window was opened inside a phase
            self._open.pop()
        self._mark()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def open_window(self) -> None:
        """The first step of a window begins here. Call it after `clock.finish`."""
        self._steps = []
        self._marks = [self._now()]

    def step_done(self) -> None:
        now = self._now()
        self._steps.append([*self._marks, now])
        self._marks = [now]

    def close_window(self) -> list[Step]:
        """The steps since `open_window`. Call it after `clock.finish`."""
        steps = [self._resolved(marks) for marks in self._steps]
        self._steps = []
        self._marks = []
        return steps

    def _now(self) -> Mark:
        phase = self._open[-1] if self._open else OTHER
        return Mark(self.clock.mark(), time.perf_counter(), phase)

    def _mark(self) -> None:
        if self._marks:
            self._marks.append(self._now())

    def _resolved(self, marks: Sequence[Mark]) -> Step:
        phases = dict.fromkeys(PHASES, 0.0)
        lengths = []
        for mark, following in itertools.pairwise(marks):
            lengths.append(self.clock.between(mark.device, following.device))
            phases[mark.phase] += lengths[-1]
        total = sum(lengths)
        paced = 0.0
        if self.clock.queues:
            ends = zip(lengths, marks[1:], strict=True)
            paced = sum(length for length, end in ends if self._lag(end) < CAUGHT_UP * total)
        return Step(total, phases, paced)

    def _lag(self, mark: Mark) -> float:
        """How far the device was behind the host, in seconds, since both were at the window's
        beginning together."""
        first = self._steps[0][0]
        return self.clock.between(first.device, mark.device) - (mark.host - first.host)
