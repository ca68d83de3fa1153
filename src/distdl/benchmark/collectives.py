"""How long ranks communicate, and how much of that no computation hides: from a trace.

torch's profiler records collectives by name (`gloo:all_reduce`, `ncclDevKernel_AllReduce...`)
beside the operations (on a GPU: kernels). Time in which a collective is under way and nothing is
computed is *exposed*: the step is longer by it. A collective lasts until the slowest rank has come,
so waiting for others is in it.

On the CPU, exposed time belongs to the phase in which it lies. On a GPU it belongs to the phase in
which the host launched the collective, since a kernel runs later than it was launched.
"""

from __future__ import annotations

import bisect
import itertools
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from distdl.benchmark.clock import OTHER, Clock
from distdl.benchmark.phases import PREFIX

COLLECTIVES = ("gloo:", "nccl", "mpi:", "ucc:")
# Operations that compute. Others surround them (`autograd::...`, Optimizer.step) or wait.
OPERATIONS = ("aten::", "mkldnn::", "## Call ")
# The trace takes memory and time with each step.
STEPS = 3
# Entries of a device's time line that are no kernels.
NOT_KERNELS = (PREFIX, "ProfilerStep", "## ", "Context Sync", "Stream Sync", "Event Sync")

Span = tuple[float, float]


@dataclass(frozen=True)
class Exposed:
    """Of one step, in seconds.

    Args:
        busy: A collective is under way.
        phases: Of that, what no computation hides, by the phase of the step.
        calls: Collectives.
    """

    busy: float
    phases: dict[str, float]
    calls: float

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


class Trace:
    """The profiler around a few steps."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        kinds = [ProfilerActivity.CPU]
        if clock.device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        # Kineto tells of itself on stderr, and of a machine without a GPU as of an error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = profile(activities=kinds)

    def start(self) -> None:
        self._profile.start()

    def stop(self, steps: int) -> Exposed:
        """What was found, per step."""
        self.clock.finish()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profile.stop()
        results = self._profile.profiler
        assert results is not None and results.kineto_results is not None
        return analyse(results.kineto_results.events(), steps)


def analyse(events: Iterable[Any], steps: int) -> Exposed:
    """Reads the events of a trace (torch's `_KinetoEvent`).

    Args:
        events: Of the whole trace.
        steps: Which it is divided by.
    """
    every = _finished(list(events))
    phases = [e for e in every if e.name().startswith(PREFIX) and _on_host(e)]
    on_device = [e for e in every if not _on_host(e)]
    launched = {}
    if any(_communicates(e) for e in on_device):
        sent = [e for e in on_device if _communicates(e)]
        computed = [
            span(e) for e in on_device if not _communicates(e) and not _begins(e, NOT_KERNELS)
        ]
        launched = {e.correlation_id(): e.start_ns() for e in every if _on_host(e)}
    else:
        sent = [e for e in every if _communicates(e)]
        # What the threads of gloo do is communication, too.
        threads = {e.start_thread_id() for e in phases}
        computed = [
            span(e)
            for e in every
            if _begins(e, OPERATIONS) and e.start_thread_id() in threads and not e.is_async()
        ]
    where = _Phases([(*span(e), e.name().removeprefix(PREFIX)) for e in phases])
    busy = merged(map(span, sent))
    computing = merged(computed)
    found: dict[str, float] = {}
    until = 0.0
    for event in sorted(sent, key=lambda e: e.start_ns()):
        start, end = span(event)
        # What two collectives share counts once.
        mine = [(max(start, until), end)] if end > until else []
        until = max(until, end)
        at = launched.get(event.correlation_id())
        for piece in without(mine, computing):
            for phase, seconds in where.shares(piece, at):
                found[phase] = found.get(phase, 0.0) + seconds / steps
    return Exposed(length(busy) / steps, found, len(sent) / steps)


def _finished(events: list[Any]) -> list[Any]:
    """Without collectives that were under way when the trace ended: their end is not in it."""
    rest = [span(e) for e in events if not _communicates(e)]
    if not rest:
        return []
    first, last = min(start for start, _ in rest), max(end for _, end in rest)
    return [e for e in events if not _communicates(e) or first <= span(e)[0] <= span(e)[1] <= last]


def span(event: Any) -> Span:
    start = event.start_ns()
    return start / 1e9, (start + event.duration_ns()) / 1e9


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time, in spans that do not meet, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start:
            found.append((start, end))
    return found


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """`spans` less `others`, of which both are in order and do not meet."""
    found = []
    starts = [start for start, _ in others]
    for start, end in spans:
        at = start
        first = max(0, bisect.bisect_right(starts, start) - 1)
        for low, high in others[first:]:
            if low >= end:
                break
            if high <= at:
                continue
            if low > at:
                found.append((at, low))
            at = max(at, high)
        if at < end:
            found.append((at, end))
    return found


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


class _Phases:
    """Which phase it was, when: of nested ones the inner one."""

    def __init__(self, ranges: Sequence[tuple[float, float, str]]) -> None:
        # Inner ones begin later, or end sooner.
        self._ranges = sorted(ranges, key=lambda r: (r[0], -r[1]))

    def shares(self, piece: Span, launched_ns: int | None) -> list[tuple[str, float]]:
        """(phase, seconds) of a piece of time, whole where its launch says the phase."""
        start, end = piece
        if launched_ns is not None:
            return [(self._at(launched_ns / 1e9), end - start)]
        edges = {start, end}
        edges |= {x for low, high, _ in self._ranges for x in (low, high) if start < x < end}
        cuts = sorted(edges)
        return [(self._at((a + b) / 2), b - a) for a, b in itertools.pairwise(cuts)]

    def _at(self, moment: float) -> str:
        inside = [name for low, high, name in self._ranges if low <= moment <= high]
        return inside[-1] if inside else OTHER


def _on_host(event: Any) -> bool:
    return event.device_type() == torch.autograd.DeviceType.CPU


def _communicates(event: Any) -> bool:
    return _begins(event, COLLECTIVES)


def _begins(event: Any, prefixes: tuple[str, ...]) -> bool:
    return event.name().startswith(prefixes)
