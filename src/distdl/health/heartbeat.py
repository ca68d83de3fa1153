"""What a rank is doing: its phase, and how long each phase of the last steps took.

Lightning gives a name to everything that it does, and passes it to the Trainer's profiler. Reading
these names takes well under a microsecond each, so that the heartbeat costs no step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

PHASES = (
    *("set-up", "prepare_data", "data", "copy", "forward", "backward", "optimizer", "callbacks"),
    *("validation", "checkpoint", "end"),
)
SET_UP, PREPARE, DATA, COPY, FORWARD, BACKWARD, OPTIMIZER, CALLBACKS = range(8)
VALIDATION, CHECKPOINT, END = range(8, 11)
UNCHANGED, IGNORED = -1, -2
# The last part of an action's name -> the phase that begins with it.
_BEGINS = {
    **dict.fromkeys(("setup", "configure_model", "on_fit_start"), SET_UP),
    "prepare_data": PREPARE,
    "train_dataloader_next": DATA,
    "batch_to_device": COPY,
    "training_step": FORWARD,
    **dict.fromkeys(("backward", "on_before_backward"), BACKWARD),
    **dict.fromkeys(("on_after_backward", "on_before_optimizer_step"), OPTIMIZER),
    **dict.fromkeys(("save_checkpoint", "on_save_checkpoint"), CHECKPOINT),
    **dict.fromkeys(("teardown", "on_fit_end"), END),
}
# Endings of actions that happen in every batch.
IN_STEP = ("_step", "_batch_start", "_batch_end", "_next", "zero_grad")
KEPT = 512  # steps
MOST = 64  # samples of a batch in a report

MARKS = 64  # phases of a step; a longer one, with a validation in it, is not timed

# Each phase of a step, as an index of PHASES, with the nanosecond (`time.time_ns`) at which it
# began; then DATA with the begin of the next step.
StepTimes = tuple[tuple[int, int], ...]


def phase_of(action: str) -> int:
    """The phase that an action of Lightning's profiler begins, as an index of PHASES."""
    name = action.rpartition(".")[2]
    if name in _BEGINS:
        return _BEGINS[name]
    if name == "on_exception":
        return IGNORED  # the report of a failure says where it happened
    if name.startswith("on_train"):
        return CALLBACKS
    evaluates = name.startswith(("on_validation", "on_sanity", "on_test", "on_predict"))
    if evaluates or name in ("validation_step", "test_step", "predict_step"):
        return VALIDATION
    return UNCHANGED


class Heartbeat:
    """Counts what a rank does. Its main thread writes, and the watchdog's thread reads."""

    def __init__(self) -> None:
        self.beats, self.action, self.phase = 0, "start", SET_UP
        self.steps: deque[StepTimes] = deque(maxlen=KEPT)
        self.count, self.longest = 0, 0.0  # of steps, and seconds of the longest one
        self._trainer: Any = None
        self._known: dict[str, int] = {}
        self._marks: deque[tuple[int, int]] = deque(maxlen=MARKS)

    def watch(self, trainer: Any) -> None:
        """Follows a Trainer, whatever its profiler is."""
        self._trainer, profiler = trainer, trainer.profiler
        profiler.profile = self._announcing(profiler.profile)
        profiler.start = self._announcing(profiler.start)

    def _announcing(self, method: Callable[[str], Any]) -> Callable[[str], Any]:
        enter = self.enter

        def announced(action: str) -> Any:
            enter(action)
            return method(action)

        return announced

    def enter(self, action: str) -> None:
        """Called at the beginning of each action."""
        phase = self._known.get(action)
        if phase is None:
            phase = self._known[action] = phase_of(action)
        self.beats += 1
        if phase == IGNORED:
            return
        self.action = action
        if phase == self.phase or phase == UNCHANGED:
            return
        mark = (phase, time.time_ns())
        if phase == DATA:
            self._end_step(mark)
        self._marks.append(mark)
        self.phase = phase

    def _end_step(self, mark: tuple[int, int]) -> None:
        if self._marks and self._marks[0][0] == DATA:
            step = (*self._marks, mark)
            pairs = pairwise(step)
            spent = sum(end - begin for (phase, begin), (_, end) in pairs if phase < CALLBACKS)
            self.longest = max(self.longest, spent / 1e9)
            self.steps.append(step)
        self.count += 1
        self._marks.clear()

    @property
    def in_step(self) -> bool:
        """Whether this is a part of a training step, or of a batch of an evaluation."""
        return DATA <= self.phase <= OPTIMIZER or self.action.endswith(IN_STEP)

    def facts(self) -> dict[str, Any]:
        """Where this rank is, for a report: step, epoch, batch, samples, phase and action."""
        facts: dict[str, Any] = {"phase": PHASES[self.phase], "action": self.action}
        trainer = self._trainer
        if trainer is None or trainer.state.fn is None:
            return facts
        # Read by another thread while the loop changes it, and in any state of the loop.
        with suppress(Exception):
            loop = trainer.fit_loop.epoch_loop
            facts |= {"step": trainer.global_step, "epoch": trainer.current_epoch}
            facts |= {"batch": loop.batch_progress.current.ready}
            if trainer.training:
                facts["samples"] = trainer.train_dataloader.batch_sampler.current()[:MOST]
        return facts
