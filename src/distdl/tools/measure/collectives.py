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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
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
        on_gpu = [ProfilerActivity.CUDA] * (clock.device.type == "cuda")
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
        assert results is not None and results.kineto_results is not None
        return analyse(results.kineto_results.events(), steps)


def analyse(events: Iterable[Any], steps: int) -> Exposed:
    """Reads the events of a trace (torch's `_KinetoEvent`) of that many steps."""
    events = _finished(list(events))
    host = [e for e in events if _on_host(e)]
    phases = [e for e in host if _begins(e, PREFIX)]
    sent = [e for e in events if not _on_host(e) and _begins(e, COLLECTIVES)]
    launched = {}
    if sent:
        others = (*COLLECTIVES, *NOT_KERNELS)
        computed = [e for e in events if not _on_host(e) and not _begins(e, others)]
        launched = {e.correlation_id(): e.start_ns() for e in host}
    else:
        sent = [e for e in host if _begins(e, COLLECTIVES)]
        # The work of gloo's own threads is communication, too.
        threads = {e.start_thread_id() for e in phases}
        operations = [e for e in host if _begins(e, OPERATIONS) and not e.is_async()]
        computed = [e for e in operations if e.start_thread_id() in threads]

    def phase_of(collective: Any) -> str:
        if (at := launched.get(collective.correlation_id())) is not None:
            inside = [e for e in phases if e.start_ns() <= at <= _end(e)]
            inside.sort(key=lambda e: (e.start_ns(), -_end(e)))
        else:
            inside = open_phases
        return inside[-1].name().removeprefix(PREFIX) if inside else OTHER

    sending: list[Any] = []
    computing: list[Any] = []
    open_phases: list[Any] = []  # the innermost one last
    edges = []
    for spans, among in ((sent, sending), (computed, computing), (phases, open_phases)):
        for event in spans:
            if event.duration_ns():
                edges.append((event.start_ns(), 1, -_end(event), event, among))
                edges.append((_end(event), 0, 0, event, among))
    edges.sort(key=lambda edge: edge[:3])
    busy, exposed = 0.0, defaultdict[str, float](float)
    for (at, begins, _, event, among), (until, *_) in itertools.pairwise([*edges, *edges[-1:]]):
        among.append(event) if begins else among.remove(event)
        if sending:
            seconds = (until - at) / 1e9 / steps
            busy += seconds
            if not computing and seconds:
                # Time that two collectives share counts once, for the one that began first.
                exposed[phase_of(sending[0])] += seconds
    return Exposed(busy, dict(exposed), len(sent) / steps)


def _finished(events: list[Any]) -> list[Any]:
    """Drops collectives that were still running when the trace ended: their end is unknown."""
    rest = [e for e in events if not _begins(e, COLLECTIVES)]
    first = min((e.start_ns() for e in rest), default=0)
    last = max(map(_end, rest), default=0)
    sent = [e for e in events if _begins(e, COLLECTIVES)]
    return rest + [e for e in sent if first <= e.start_ns() <= _end(e) <= last]


def _end(event: Any) -> int:
    return event.start_ns() + event.duration_ns()


def _on_host(event: Any) -> bool:
    return event.device_type() == torch.autograd.DeviceType.CPU


def _begins(event: Any, prefixes: str | tuple[str, ...]) -> bool:
    return event.name().startswith(prefixes)
