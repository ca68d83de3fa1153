"""What a rank is doing: its phase, and how long each phase of the last steps took.

Lightning gives a name to everything that it does, and passes it to the Trainer's profiler. Only the
steps that are compared between the ranks are timed: see `distdl.health.peers`.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PHASES = (
    *("set-up", "prepare_data", "data", "copy", "forward", "backward", "optimizer", "callbacks"),
    *("validation", "checkpoint", "end"),
)
SET_UP, PREPARE, DATA, COPY, FORWARD, BACKWARD, OPTIMIZER, CALLBACKS = range(8)
VALIDATION, CHECKPOINT, END = range(8, 11)
EVALUATIONS, PARTS = ("validation", "val", "test", "predict"), ("step", "next")
# The last part of an action's name -> its phase.
_BEGINS = {
    **dict.fromkeys(("setup", "configure_model", "on_fit_start"), SET_UP),
    "prepare_data": PREPARE,
    "train_dataloader_next": DATA,
    "batch_to_device": COPY,
    "training_step": FORWARD,
    "backward": BACKWARD,
    "on_after_backward": OPTIMIZER,
    **dict.fromkeys((f"{each}_{part}" for each in EVALUATIONS for part in PARTS), VALIDATION),
    **dict.fromkeys(("save_checkpoint", "on_save_checkpoint"), CHECKPOINT),
    **dict.fromkeys(("teardown", "on_fit_end"), END),
}
# Endings of actions that happen in every batch.
IN_STEP = ("_step", "_batch_start", "_batch_end", "_next", "zero_grad")
KEPT = 512  # steps
MOST = 64  # samples of a batch in a report
# A heartbeat's file: memory shared with the monitor, with the numbers of the action, step, epoch
# and batch (-1: unknown). Then follows a line for each action.
FIELDS, NUMBERS = "4q", 64  # bytes
# The actions with which a batch begins and ends, once each.
MOMENTS = re.compile(
    r"^\[Strategy\].*\.on_train_batch_start$|^\[LightningModule\].*\.on_train_batch_end$"
)

MARKS = 64  # phases of a step; a longer one, with a validation in it, is not timed

# Each phase of a step, as an index of PHASES, with the nanosecond (`time.time_ns`) at which it
# began; then DATA with the begin of the next step.
StepTimes = tuple[tuple[int, int], ...]


def phase_of(action: str) -> int | None:
    """The phase that an action of Lightning's profiler belongs to, as an index of PHASES; None: to
    the one of the action before it."""
    name = action.rpartition(".")[2]
    if name in _BEGINS:
        return _BEGINS[name]
    if name.startswith("on_train"):
        return CALLBACKS
    evaluates = name.startswith(("on_validation", "on_sanity", "on_test", "on_predict"))
    return VALIDATION if evaluates else None


def read(file: int) -> dict[str, Any]:
    """What a rank does, or did last, by the number of its heartbeat's open file."""
    data = os.pread(file, 1 << 20, 0)
    number, *counts = struct.unpack_from(FIELDS, data)
    names = dict(enumerate(["start", *data[NUMBERS:].decode(errors="replace").splitlines()]))
    action = names.get(number, "")
    progress = dict(zip(("step", "epoch", "batch"), counts, strict=True))
    known = {name: count for name, count in progress.items() if count >= 0}
    return {"phase": PHASES[phase_of(action) or SET_UP], "action": action, **known}


class RankHeartbeat:
    """Counts what a rank does. Its main thread writes, and the watchdog's thread reads. So does the
    monitor (`file`), which then knows it to the moment at which the rank was killed.

    `enter(action)` is called at the beginning of each action, about 40 times per step, and mostly
    with cold caches: what it touches is what it costs.
    """

    def __init__(self) -> None:
        self.beats = 0  # actions so far
        self.timing = False  # whether steps are added to `steps` now
        self.steps: deque[StepTimes] = deque(maxlen=KEPT)
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self.file.write(struct.pack(FIELDS, 0, -1, -1, -1).ljust(NUMBERS))
        self._shared = memoryview(mmap.mmap(self.file.fileno(), NUMBERS)).cast("q")
        self._names, self._phases = ["start"], [SET_UP]  # of each action, by its number
        # Action -> number; 0: it belongs to the one before; negative: progress is shared there.
        self._known: dict[str, int] = {}
        self._shares = 0  # of progress, twice per step
        self._marks: deque[tuple[int, int]] = deque(maxlen=MARKS)
        self._marked = 0  # the steps before `_marks`
        self._trainer: Any = None
        self._progress: tuple[Any, ...] = ()  # optimizer steps, epochs, and the epoch's batches
        self.enter = self._entering(None)

    def watch(self, trainer: Any) -> None:
        """Follows a Trainer, whatever its profiler is."""
        self._trainer, profiler = trainer, trainer.profiler
        if idle := getattr(profiler, "idle", None):  # what a profiler that does nothing returns
            profiler.profile = profiler.start = self._entering(idle)
        else:
            profiler.profile = self._announcing(profiler.profile)
            profiler.start = self._announcing(profiler.start)
        with suppress(AttributeError):  # of another version of Lightning
            loop = trainer.fit_loop.epoch_loop
            steps = loop.automatic_optimization.optim_progress.optimizer.step.total
            other = loop.manual_optimization.optim_step_progress.total
            epochs, batches = trainer.fit_loop.epoch_progress.current, loop.batch_progress.current
            self._progress = (steps, other, epochs, batches)

    def _announcing(self, method: Callable[[str], Any]) -> Callable[[str], Any]:
        def announced(action: str) -> Any:
            self.enter(action)
            return method(action)

        return announced

    def _entering(self, result: Any) -> Callable[[str], Any]:
        """`enter`, which returns `result`. A closure takes half the time of a method."""
        known, shared = self._known, self._shared

        def enter(action: str) -> Any:
            number = known.get(action)
            if number is None:
                number = self._learn(action)
            if number:
                self.beats += 1
                if number < 0:
                    number = -number
                    self._share_progress(number)
                shared[0] = number
                if self.timing:
                    self._mark(number)
            return result

        return enter

    def _learn(self, action: str) -> int:
        phase, number = phase_of(action), 0
        if phase is not None:
            number = -len(self._names) if MOMENTS.search(action) else len(self._names)
            self._names.append(action)
            self._phases.append(phase)
            with suppress(OSError):  # a full disk: the monitor then knows no name
                self.file.write(f"{action}\n".encode())
        self._known[action] = number
        return number

    def _share_progress(self, number: int) -> None:
        if number == self._shared[0]:  # a profiler's `profile` may call its `start`
            return
        self._shares += 1
        if self._progress:  # read directly: Trainer.global_step takes ten times as long
            automatic, manual, epoch, batch = self._progress
            self._shared[1] = automatic.completed + manual.completed
            self._shared[2], self._shared[3] = epoch.completed, batch.ready

    def _mark(self, number: int) -> None:
        phase, marks = self._phases[number], self._marks
        if marks and marks[-1][0] == phase:
            return
        mark = (phase, time.time_ns())
        if phase == DATA:
            if marks and marks[0][0] == DATA and self.count == self._marked + 1:
                self.steps.append((*marks, mark))
            marks.clear()
            self._marked = self.count
        marks.append(mark)

    @property
    def count(self) -> int:
        """Training steps so far."""
        return self._shares // 2

    @property
    def action(self) -> str:
        return self._names[self._shared[0]]

    @property
    def phase(self) -> int:
        """An index of PHASES."""
        return self._phases[self._shared[0]]

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
