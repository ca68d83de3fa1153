"""Which part of Lightning's loop is which phase of a step, under any strategy.

Lightning tells its profiler the name of every hook that it calls; this one listens to a few of
them. A pipeline's forward and backward are one hook to Lightning: there the stage's own calls tell
them apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.profilers import Profiler

from distdl.benchmark.clock import BACKWARD, COMMUNICATION, DATA, FORWARD, OPTIMIZER, Timeline

# The end of the name of a hook of Lightning (2.6) -> phase.
HOOKS = {
    ".train_dataloader_next": DATA,
    ".batch_to_device": DATA,
    ".training_step": FORWARD,
    ".backward": BACKWARD,
    ".optimizer_step": OPTIMIZER,
}
# Only these speak of the step as a whole; a module's own hook is called inside.
SPEAKERS = ("[Strategy]", "[_TrainingEpochLoop]", "[LightningModule]")
PREFIX = "distdl::"


class PhaseProfiler(Profiler):
    """In the place of `trainer.profiler`: phases to a Timeline, and to a trace while one runs."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self.timeline = timeline
        self.tracing = False
        self._known: dict[str, str | None] = {}
        self._ranges: list[Any] = []

    def start(self, action_name: str) -> None:
        phase = self._phase(action_name)
        if phase is not None:
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
            ours = (phase for end, phase in HOOKS.items() if action.endswith(end))
            # A data module has a hook of the same name as the strategy's.
            self._known[action] = next(ours, None) if action.startswith(SPEAKERS) else None
        return self._known[action]


@contextmanager
def stages_listened_to(timeline: Timeline) -> Iterator[None]:
    """A pipeline's forward and backward, and as communication what lies between them: messages
    and waiting for the neighbours, which is the bubble."""
    from distdl.strategies.pipeline.engine import Engine, Stage
    from distdl.strategies.pipeline.reduction import GradientReducer

    listened: list[tuple[Any, str, str]] = [
        (Engine, "train", COMMUNICATION),
        (Stage, "forward_one_chunk", FORWARD),
        (Stage, "backward_one_chunk", BACKWARD),
        (Stage, "backward_weight_one_chunk", BACKWARD),
        (GradientReducer, "finish", COMMUNICATION),
    ]
    with ExitStack() as stack:
        for owner, name, phase in listened:
            own = vars(owner).get(name)
            stack.callback(setattr if own else delattr, owner, name, *([own] if own else []))
            setattr(owner, name, _timed(getattr(owner, name), timeline, phase))
        yield


def _timed(original: Callable[..., Any], timeline: Timeline, phase: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with timeline.phase(phase):
            return original(*args, **kwargs)

    return call
