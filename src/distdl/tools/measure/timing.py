"""Runs a benchmark's plan inside a training (warm-up, windows, a trace), then ends the training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.utils.flop_counter import FlopCounterMode

from distdl.callbacks.metrics import batch_size_of
from distdl.distributed import process_group
from distdl.distributed.agreement import Agreement
from distdl.ranks.stopping import StopRequest
from distdl.tools.measure.clock import Step, Timeline
from distdl.tools.measure.collectives import CollectiveTrace, Exposed
from distdl.tools.measure.input import Input
from distdl.tools.measure.phases import PhaseProfiler

log = logging.getLogger(__name__)

WARM, WINDOW, TRACE = "warm-up", "window", "trace"
REAL, HELD = "real", "held"


@dataclass(frozen=True)
class Segment:
    """A number of optimizer steps of one kind, on real or held input."""

    kind: str
    input: str
    steps: int


@dataclass
class TimedWindow:
    """One measured window: its steps, and the seconds from one synchronisation to the next."""

    input: str
    seconds: float
    steps: list[Step]


@dataclass
class Timing(Callback):
    """The callback that runs the plan. All ranks follow it in step.

    Args:
        plan: In order. A warm-up on real input also uses up the batches that worker processes have
            ready when it begins, so that the windows do not measure prefetched batches.
        report: Called with each window, on every rank.
    """

    plan: list[Segment]
    timeline: Timeline
    profiler: PhaseProfiler
    input: Input
    stop: StopRequest
    report: Callable[[TimedWindow], None]
    windows: list[TimedWindow] = field(default_factory=list)
    exposed: Exposed | None = None
    batch_size: int | None = None
    epoch_batches: int | None = None
    # FLOPs of a batch under manual optimization: such a step runs only inside its trainer.
    live_flops: float | None = None
    _counter: FlopCounterMode | None = None
    _trace: CollectiveTrace | None = None

    # Lightning hashes callbacks, and a dataclass with `__eq__` has no hash.
    __hash__ = object.__hash__

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._agreement = Agreement(2)
        ready = max(process_group.gather(self.input.prefetched()))
        self.epoch_batches = max(process_group.gather(self.input.batches() or 0)) or None
        more = -(-ready // trainer.accumulate_grad_batches)
        self._due = []
        for part in self.plan:
            if (part.kind, part.input) == (WARM, REAL):
                part = replace(part, steps=part.steps + more)
            self._due.append(part)
        self._last_step = trainer.global_step
        self._begin()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *_: object
    ) -> None:
        if self.live_flops is None and not pl_module.automatic_optimization:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()  # in the first warm-up step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
    ) -> None:
        self._stop_counting()
        if trainer.global_step == self._last_step:
            return  # part of an accumulated step
        self._last_step = trainer.global_step
        if self._agreement.exchange(bool(self.stop), False)[0]:
            process_group.check_all(self.stop, "during the benchmark")
        self.timeline.step_done()
        self._left -= 1
        if self._left:
            return
        self.batch_size = self.batch_size or batch_size_of(batch)
        self._end(self._due.pop(0))
        if self._due:
            self._begin()
        else:
            trainer.should_stop = True

    def _stop_counting(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self.live_flops = float(self._counter.get_total_flops())
            self._counter = None

    def _begin(self) -> None:
        segment = self._due[0]
        self._left = segment.steps
        self.input.held = segment.input == HELD
        if segment.kind == TRACE:
            self._trace = CollectiveTrace(self.timeline.clock)
            self.profiler.tracing = True
            self._trace.start()
        self._started = self.timeline.clock.finish()
        self.timeline.open_window()

    def _end(self, segment: Segment) -> None:
        ended = self.timeline.clock.finish()
        steps = self.timeline.close_window()
        if segment.kind == WINDOW:
            self.windows.append(TimedWindow(segment.input, ended - self._started, steps))
            self.report(self.windows[-1])
        self._stop_tracing(segment.steps)

    def _stop_tracing(self, steps: int) -> None:
        if self._trace is not None and self.profiler.tracing:
            self.profiler.tracing = False
            self.exposed = self._trace.stop(steps)

    def on_exception(self, *args: object) -> None:
        self._stop_counting()
        self._stop_tracing(1)
