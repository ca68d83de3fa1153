"""Reads from a trace how long ranks communicate, and how much of it no computation hides.

torch's profiler records collectives by name (`gloo:all_reduce`, `ncclDevKernel_AllReduce...`)
beside the operations (on a GPU: kernels). Time in which a collective runs and nothing is computed
is *exposed*: it lengthens the step. It includes waiting for the slowest rank.

On the CPU, exposed time is assigned to the phase in which it occurs. On a GPU a kernel runs later
than its launch, so the time is assigned to the phase in which the host launched the collective.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch._C._autograd import _KinetoEvent
from torch.profiler import ProfilerActivity, profile

from distdl.tools.measure import OTHER
from distdl.tools.measure.clock import DeviceClock
from distdl.tools.measure.phases import PREFIX

COLLECTIVES = ("gloo:", "nccl", "mpi:", "ucc:")
# Operations that compute. Others contain them (`autograd::...`, Optimizer.step) or wait.
OPERATIONS = ("aten::", "mkldnn::", "## Call ")
# Entries of a device's timeline that are not kernels.
NOT_KERNELS = (PREFIX, "ProfilerStep", "## ", "Context Sync", "Stream Sync", "Event Sync")


@dataclass(frozen=True)
class Exposed:
    """Values of one step, times in seconds."""

    busy: float  # a collective runs
    phases: dict[str, float]  # the part of it that no computation hides, by the phase of the step
    calls: float  # number of collectives


class CollectiveTrace:
    """torch's profiler around a few steps."""

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        on_gpu = [ProfilerActivity.CUDA] if clock.device.type == "cuda" else []
        # Kineto logs to stderr, and reports a missing GPU as an error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])

    def start(self) -> None:
        self._profile.start()

    def stop(self, steps: int) -> Exposed:
        """What the trace shows, per step."""
        self.clock.finish()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profile.stop()
        results = self._profile.profiler
        assert results is not None
        assert results.kineto_results is not None
        return analyse(results.kineto_results.events(), steps)


def analyse(events: Iterable[_KinetoEvent], steps: int) -> Exposed:
    """Reads the events of a trace (torch's `_KinetoEvent`) of that many steps."""
    seen = sorted_by_kind(_finished(list(events)))
    busy = 0.0
    exposed = defaultdict[str, float](float)
    for seconds, sending, computing, phases in moments(seen):
        if not sending:
            continue
        busy += seconds / steps
        if not computing and seconds:
            # Time that two collectives share counts once, for the one that began first.
            exposed[phase_of(sending[0], seen, phases)] += seconds / steps
    return Exposed(busy, dict(exposed), len(seen.sent) / steps)


@dataclass(frozen=True)
class Seen:
    """The events of a trace, by what they tell.

    Args:
        sent: Collectives.
        computed: What hides them.
        phases: Of the steps, on the host.
        launched: On a GPU: by correlation, when the host launched a collective.
    """

    sent: list[_KinetoEvent]
    computed: list[_KinetoEvent]
    phases: list[_KinetoEvent]
    launched: dict[int, int]


def sorted_by_kind(events: list[_KinetoEvent]) -> Seen:
    host = [e for e in events if _on_host(e)]
    phases = [e for e in host if _begins(e, PREFIX)]
    on_device = [e for e in events if not _on_host(e)]
    if sent := [e for e in on_device if _begins(e, COLLECTIVES)]:
        kernels = [e for e in on_device if not _begins(e, (*COLLECTIVES, *NOT_KERNELS))]
        return Seen(sent, kernels, phases, {e.correlation_id(): e.start_ns() for e in host})
    # The work of gloo's own threads is communication, too.
    threads = {e.start_thread_id() for e in phases}
    operations = [e for e in host if _begins(e, OPERATIONS) and not e.is_async()]
    computed = [e for e in operations if e.start_thread_id() in threads]
    return Seen([e for e in host if _begins(e, COLLECTIVES)], computed, phases, {})


def moments(
    seen: Seen,
) -> Iterator[tuple[float, list[_KinetoEvent], list[_KinetoEvent], list[_KinetoEvent]]]:
    """The time between each two changes: its seconds, and the collectives, the computations and
    the phases (the innermost one last) that are under way in it."""
    under_way: tuple[list[_KinetoEvent], list[_KinetoEvent], list[_KinetoEvent]] = ([], [], [])
    edges = []
    for events, running in zip((seen.sent, seen.computed, seen.phases), under_way, strict=True):
        for event in events:
            if event.duration_ns():
                edges.append((event.start_ns(), 1, -_end(event), event, running))
                edges.append((_end(event), 0, 0, event, running))
    edges.sort(key=lambda edge: edge[:3])
    for (at, begins, _, event, running), (until, *_) in itertools.pairwise([*edges, *edges[-1:]]):
        if begins:
            running.append(event)
        else:
            running.remove(event)
        yield (until - at) / 1e9, *under_way


def phase_of(collective: _KinetoEvent, seen: Seen, under_way: list[_KinetoEvent]) -> str:
    """The phase in which a collective is; on a GPU that in which the host launched it."""
    inside = under_way
    if (at := seen.launched.get(collective.correlation_id())) is not None:
        inside = [e for e in seen.phases if e.start_ns() <= at <= _end(e)]
        inside.sort(key=lambda e: (e.start_ns(), -_end(e)))
    return inside[-1].name().removeprefix(PREFIX) if inside else OTHER


def _finished(events: list[_KinetoEvent]) -> list[_KinetoEvent]:
    """Drops collectives that were still running when the trace ended: their end is unknown."""
    rest = [e for e in events if not _begins(e, COLLECTIVES)]
    first = min((e.start_ns() for e in rest), default=0)
    last = max(map(_end, rest), default=0)
    sent = [e for e in events if _begins(e, COLLECTIVES)]
    return rest + [e for e in sent if first <= e.start_ns() <= _end(e) <= last]


def _end(event: _KinetoEvent) -> int:
    return event.start_ns() + event.duration_ns()


def _on_host(event: _KinetoEvent) -> bool:
    return event.device_type() == torch.autograd.DeviceType.CPU


def _begins(event: _KinetoEvent, prefixes: str | tuple[str, ...]) -> bool:
    return event.name().startswith(prefixes)
