"""Which part of Lightning's loop belongs to which phase of a step, under any strategy.

Lightning reports the name of every hook that it calls to its profiler. To Lightning, a pipeline's
forward and backward are one hook, so there the stage's own calls separate them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import torch
from lightning.pytorch.profilers import Profiler

from distdl.loops.fit import EpochLoop
from distdl.tools.measure import BACKWARD, COMMUNICATION, DATA, FORWARD, OPTIMIZER
from distdl.tools.measure.clock import Timeline

# The end of a hook's name in Lightning (2.6) -> phase.
P = ParamSpec("P")
Result = TypeVar("Result")

HOOKS = {
    ".train_dataloader_next": DATA,
    ".batch_to_device": DATA,
    ".training_step": FORWARD,
    ".backward": BACKWARD,
    ".optimizer_step": OPTIMIZER,
}
# Only these contain the whole phase; a module's own hook is called inside them.
OWNERS = ("[Strategy]", f"[{EpochLoop.__name__}]", "[LightningModule]")
PREFIX = "distdl::"


class PhaseProfiler(Profiler):
    """For `trainer.profiler`: reports phases to a Timeline, and to a trace while one runs."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self.timeline = timeline
        self.tracing = False
        self._known: dict[str, str | None] = {}
        self._ranges: list[Any] = []

    def start(self, action_name: str) -> None:
        if (phase := self._phase(action_name)) is not None:
            self.timeline.begin(phase)
            if self.tracing:
                entered = torch.profiler.record_function(PREFIX + phase)
                entered.__enter__()
                self._ranges.append(entered)

    def stop(self, action_name: str) -> None:
        if self._phase(action_name) is not None:
            if self._ranges:
                self._ranges.pop().__exit__(None, None, None)
            self.timeline.end()

    def _phase(self, action: str) -> str | None:
        if action not in self._known:
            # A data module has a hook of the same name as the strategy.
            hook = "." + action.rpartition(".")[2] if action.startswith(OWNERS) else ""
            self._known[action] = HOOKS.get(hook)
        return self._known[action]


@contextmanager
def pipeline_phases(timeline: Timeline) -> Iterator[None]:
    """Times a pipeline's forward and backward. The time between them counts as communication:
    messages, and waiting for the neighbours, which is the bubble."""
    from distdl.strategies.pipeline.engine import Engine, Stage
    from distdl.strategies.pipeline.reduction import GradientReducer

    calls: list[tuple[Any, str, str]] = [
        (Engine, "train", COMMUNICATION),
        (Stage, "forward_one_chunk", FORWARD),
        (Stage, "backward_one_chunk", BACKWARD),
        (Stage, "backward_weight_one_chunk", BACKWARD),
        (GradientReducer, "finish", COMMUNICATION),
    ]
    with ExitStack() as stack:
        for owner, name, phase in calls:
            timed = _timed(getattr(owner, name), timeline, phase)
            stack.enter_context(patch.object(owner, name, timed))
        yield


def _timed(original: Callable[P, Result], timeline: Timeline, phase: str) -> Callable[P, Result]:
    @functools.wraps(original)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        with timeline.phase(phase):
            return original(*args, **kwargs)

    return call
