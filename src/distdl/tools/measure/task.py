"""Measures training: warm-up, timed windows on real input and on one held batch, a verdict."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer
from lightning.pytorch.loggers.logger import DummyLogger

from distdl.callbacks import Checkpointer, Progress, StepMetrics
from distdl.config.schema import TrainerArguments
from distdl.distributed import process_group
from distdl.runs.directory import write_json
from distdl.tools.measure import FILE, limits, model, result, screen
from distdl.tools.measure.clock import DeviceClock, Timeline
from distdl.tools.measure.input import Input
from distdl.tools.measure.phases import PhaseProfiler, pipeline_phases
from distdl.tools.measure.timing import (
    HELD,
    REAL,
    TRACE,
    WARM,
    WINDOW,
    Segment,
    TimedWindow,
    Timing,
)
from distdl.util.errors import Problem
from distdl.worker.build import Built
from distdl.worker.task import Metrics, Task

log = logging.getLogger(__name__)

# The smallest values allowed: one step has no p95.
LEAST = {"warmup": 1, "windows": 1, "steps": 2, "trace": 0}
# Steps after a change of input, during which the device's queue empties and fills again.
SETTLE = 3
# Callbacks that write files, or end a training. benchmarks/overhead.py measures distdl's own.
NOT_TIMED = (Checkpointer, Checkpoint, EarlyStopping, Timer, Progress, StepMetrics)


class Benchmark(Task[Built]):
    """Measures the run's own training step and writes RUN/benchmark.json (docs/benchmark.md).

    It trains from fresh weights, without checkpoints, curves and validations.

    Args:
        warmup: Optimizer steps before the first window, besides the batches that loader workers
            have ready by then.
        windows: Timed windows with real input, and as many with held input.
        steps: Optimizer steps per window.
        trace: Optimizer steps under torch's profiler, which measures the communication; 0 for none.
    """

    calls = ("training_step", "train_dataloader")

    def __init__(self, warmup: int = 10, windows: int = 5, steps: int = 20, trace: int = 3) -> None:
        self.warmup = warmup
        self.windows = windows
        self.steps = steps
        self.trace = trace

    @classmethod
    def check(cls, node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem | str]:
        yield from super().check(node, context)
        for name, least in LEAST.items():
            value = node.get(name, least)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                yield Problem(
                    name,
                    what=f"must be an integer of at least {least}, not {value!r}",
                    remedy=f"task.{name}={least}",
                    code="wrong-type",
                )

    def run(self, context: Built) -> Metrics:
        """Returns the main numbers, as `benchmark/...`."""
        trainer = context.trainer
        timing = timed_fit(context, self._plan(trainer))
        device = trainer.strategy.root_device
        precision = TrainerArguments.of(context.config.trainer).precision_name
        measured = result.of_rank(timing, device)
        measured["limits"] = vars(limits.measure(device, precision))
        link = limits.measure_link(device, trainer.num_nodes)
        ranks = process_group.gather(measured)
        report: dict[str, Any] = {}
        if trainer.is_global_zero:
            size = result.batch_size(context, timing)
            if context.module.automatic_optimization:
                counted = model.count(context.config, size.global_batch)
            else:
                counted = model.from_a_live_step(context.module, timing.live_flops, size.batch)
            report = result.assemble(context, timing, ranks, link, counted)
            write_json(context.run.path / FILE, report)
            screen.show(report)
            for logger in trainer.loggers:
                logger.log_metrics(result.metrics(report), 0)
        return result.metrics(process_group.broadcast(report), result.MAIN)

    def _plan(self, trainer: Trainer) -> list[Segment]:
        plan = [Segment(WARM, REAL, self.warmup)]
        # Alternating, so that a change of the machine's speed affects both inputs.
        for _ in range(self.windows):
            plan += [Segment(WINDOW, REAL, self.steps), Segment(WARM, HELD, SETTLE)]
            plan += [Segment(WINDOW, HELD, self.steps), Segment(WARM, REAL, SETTLE)]
        # A pipeline's phases show its communication already.
        if self.trace and trainer.world_size > 1 and not _is_pipeline(trainer):
            plan.append(Segment(TRACE, HELD, self.trace))
        return plan


def _is_pipeline(trainer: Trainer) -> bool:
    return hasattr(trainer.strategy, "data_share")


def timed_fit(context: Built, plan: list[Segment]) -> Timing:
    """Trains for the steps of the plan, without callbacks and loggers that write."""
    trainer: Any = context.trainer
    stop = next(c.stop for c in trainer.callbacks if isinstance(c, Checkpointer))
    timeline = Timeline(DeviceClock(trainer.strategy.root_device))
    source = Input()
    profiler = PhaseProfiler(timeline)
    windows = sum(segment.kind == WINDOW for segment in plan) // 2

    def report(window: TimedWindow) -> None:
        if trainer.is_global_zero:
            number = sum(one.input == window.input for one in timing.windows)
            log.info(
                "%s input, window %d of %d: %.4g ms a step",
                window.input,
                number,
                windows,
                1000 * window.seconds / len(window.steps),
            )

    timing = Timing(plan, timeline, profiler, source, stop, report)
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, NOT_TIMED)] + [timing]
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger()]
    trainer.profiler = profiler
    # The plan decides when to stop; epochs have no end.
    trainer.limit_train_batches = 1.0
    trainer.limit_val_batches = 0
    loop = trainer.fit_loop
    loop.max_epochs = max(loop.max_epochs or 1, 1)
    loop.min_epochs = loop.epoch_loop.min_steps = None
    loop.epoch_loop.max_steps = -1
    source.install(trainer)
    try:
        with pipeline_phases(timeline) if _is_pipeline(trainer) else nullcontext():
            trainer.fit(context.module, datamodule=context.datamodule)
    finally:
        source.remove()
    trainer.loggers = loggers
    return timing
