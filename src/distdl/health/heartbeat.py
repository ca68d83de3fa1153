"""What a rank is doing: its phase, its progress, and how long each phase of a step takes.

The watchdog's thread looks at the stack of the main thread, where a function of Lightning's tells
the phase. The main thread itself only counts its steps, in memory shared with the monitor, which
then knows the step at which a rank was killed. Phases are timed by the names that Lightning passes
to the Trainer's profiler, and only while the ranks are compared: see `distdl.health.peers`.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

PHASES = (
    "set-up",
    "prepare_data",
    "data",
    "copy",
    "forward",
    "backward",
    "optimizer",
    "callbacks",
    "validation",
    "checkpoint",
    "end",
)
SET_UP, PREPARE, DATA, COPY, FORWARD, BACKWARD, OPTIMIZER, CALLBACKS = range(8)
VALIDATION, CHECKPOINT, END = range(8, 11)
# Functions of a stack, as "file:function": the innermost one that fits tells the phase.
_FUNCTIONS = (
    (CHECKPOINT, r"/distdl/checkpoint/|/checkpoint_connector\.py:|/trainer\.py:save_checkpoint$"),
    (PREPARE, r"/data_connector\.py:prepare_data$"),
    (DATA, r"/loops/fetchers\.py:"),
    (COPY, r"/strategies/.*:batch_to_device$"),
    (FORWARD, r"/strategies/.*:training_step$"),
    (BACKWARD, r"/strategies/.*:backward$"),
    (OPTIMIZER, r"/strategies/.*:optimizer_step$"),
    (VALIDATION, r"/loops/(evaluation|prediction)_loop\.py:"),
    (SET_UP, r"/loops/fit_loop\.py:(setup_data|on_run_start|reset)$"),
    (CALLBACKS, r"/loops/(training_epoch|fit)_loop\.py:"),
)
# Calls that all ranks have to make. They tell no phase, but what the rank does in it.
_CALLS = re.compile(r"/core/(module)\.py:(log|log_dict|all_gather)$")
_PHASE = re.compile("|".join(f"(?P<p{phase}>{pattern})" for phase, pattern in _FUNCTIONS))
# These run once per batch.
_BATCH = re.compile(r"/training_epoch_loop\.py:advance$|:_(evaluation|predict)_step$|:__next__$")
# The last part of an action's name -> the phase that begins with it.
_BEGINS = {
    "train_dataloader_next": DATA,
    "batch_to_device": COPY,
    "training_step": FORWARD,
    "backward": BACKWARD,
    "on_after_backward": OPTIMIZER,
    "save_checkpoint": CHECKPOINT,
    "on_save_checkpoint": CHECKPOINT,
}
FETCHERS = "/loops/fetchers.py"  # the part of Lightning that waits for batches
KEPT = 512  # steps
DEEP = 100  # frames of a stack that are seen: `distdl.health.stacks`
MOST = 64  # samples of a batch in a report
MARKS = 64  # phases of a step; a longer one, with a validation in it, is not timed
# The memory shared with the monitor: step, epoch, batch (-1: unknown).
FIELDS = "3q"
PROGRESS = ("step", "epoch", "batch")

P = ParamSpec("P")
R = TypeVar("R")

# A file, a line and a function.
Frame = tuple[str, str | int, str]
# Each phase of a step, as an index of PHASES, with the nanosecond (`time.time_ns`) at which it
# began; then DATA with the begin of the next step.
StepTimes = tuple[tuple[int, int], ...]


def begins(action: str) -> int | None:
    """The phase that begins with an action of Lightning's profiler; None: none does."""
    name = action.rpartition(".")[2]
    if name.startswith("on_train"):
        return CALLBACKS
    return VALIDATION if name.startswith(("on_validation", "on_sanity")) else _BEGINS.get(name)


def seen_in(stack: Iterable[Frame]) -> tuple[int | None, str, bool]:
    """The phase that a stack is in (the innermost frame first; None: outside all loops), the
    function that tells it, and whether this is part of a batch."""
    stack = [*stack]
    functions = [_function(file, name) for file, _, name in stack]
    functions = [each for each in functions if each.known]
    if not functions:
        return None, "", False
    phase = functions[0].phase
    action = functions[0].action
    for file, _, name in stack:
        call = _CALLS.search(f"{file}:{name}")
        if call:
            action = call.expand(r"\1.\2")
            break
    if phase != CHECKPOINT and any(each.phase == VALIDATION for each in functions):
        phase = VALIDATION
    return phase, action, phase != CHECKPOINT and any(each.in_batch for each in functions)


class _Function(NamedTuple):
    """What is known of a function in a stack."""

    known: bool
    phase: int = SET_UP
    action: str = ""
    in_batch: bool = False


@functools.lru_cache(4096)
def _function(file: str, name: str) -> _Function:
    where = f"{file}:{name}"
    match = _PHASE.search(where)
    if match is None:
        return _Function(False)
    phase = int(str(match.lastgroup)[1:])
    return _Function(True, phase, f"{Path(file).stem}.{name}", bool(_BATCH.search(where)))


def read(file: int) -> dict[str, int]:
    """How far a rank was, by the number of its heartbeat's open file; empty: in no step yet."""
    counts = struct.unpack(FIELDS, os.pread(file, struct.calcsize(FIELDS), 0))
    return dict(zip(PROGRESS, counts, strict=True)) if min(counts) >= 0 else {}


class RankHeartbeat:
    """What a rank is doing. Its main thread counts steps; the watchdog's thread looks."""

    def __init__(self) -> None:
        self.phase = SET_UP
        self.action = "start"
        self.in_step = False
        self.count = 0  # training steps begun
        self.steps: deque[StepTimes] = deque(maxlen=KEPT)
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self.file.write(struct.pack(FIELDS, -1, -1, -1))
        self._shared = memoryview(mmap.mmap(self.file.fileno(), struct.calcsize(FIELDS))).cast("q")
        self._marks: deque[tuple[int, int]] = deque(maxlen=MARKS)
        self._marked = 0  # the steps begun before `_marks`
        self._timing = False
        self._trainer: Any = None

    def watch(self, trainer: Trainer) -> None:
        """Follows a Trainer, whatever its strategy and profiler are."""
        self._trainer = trainer
        self._timing = False  # another Trainer's profiler
        training_step = self._counted(trainer.strategy.training_step)
        trainer.strategy.training_step = training_step  # type: ignore[method-assign]
        trainer.fit_loop.after_batches = self._share  # type: ignore[attr-defined]

    def let_go(self) -> None:
        """Forgets the Trainer, which then takes no memory, until the next one is watched."""
        self._trainer = None

    def _counted(self, training_step: Callable[P, R]) -> Callable[P, R]:
        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            self.count += 1
            self._share()
            return training_step(*args, **kwargs)

        return counted

    def _share(self) -> None:
        with suppress(AttributeError):  # of another version of Lightning
            fit = self._trainer.fit_loop
            self._shared[0] = fit.epoch_loop.global_step
            self._shared[1] = fit.epoch_progress.current.completed
            self._shared[2] = fit.epoch_loop.batch_progress.current.ready

    def look(self, stack: Iterable[Frame]) -> None:
        """Called by the watchdog's thread with the stack of the main thread."""
        stack = [*stack]
        phase, action, in_batch = seen_in(stack)
        if phase is None and len(stack) >= DEEP:
            return  # of so deep a stack the outer frames, which tell the phase, are not seen
        self.action = action
        fetches = any(file.endswith(FETCHERS) for file, _, _ in stack)
        # The wait for the first batch is that for the workers, which start and open their files.
        trainer = self._trainer
        self.in_step = in_batch and not (fetches and (trainer is None or trainer.has_no_batch))
        if phase is None:
            ends = self.count and trainer is not None and trainer.state.fn == "fit"
            phase = END if ends else SET_UP
        self.phase = phase

    @property
    def progress(self) -> tuple[Any, ...]:
        """Differs from before if anything was done."""
        done: list[Any] = [self.phase, self.action]
        with suppress(AttributeError):
            trainer = self._trainer
            loop = self._trainer.fit_loop.epoch_loop
            evaluations = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
            done += [loop.global_step, loop.batch_progress.total.ready]
            done += [e.batch_progress.total.ready for e in (loop.val_loop, *evaluations)]
        return tuple(done)

    def time_steps(self, wanted: bool) -> None:
        """Begins or ends to add to `steps`."""
        trainer = self._trainer
        if trainer is None or wanted == self._timing:
            return
        profiler = trainer.profiler
        self._timing = wanted
        for name in ("profile", "start"):
            if wanted:
                setattr(profiler, name, self._timed(getattr(profiler, name)))
            else:
                vars(profiler).pop(name, None)

    def _timed(self, method: Callable[[str], R]) -> Callable[[str], R]:
        def timed(action: str) -> R:
            self.mark(action)
            return method(action)

        return timed

    def mark(self, action: str) -> None:
        """Called at the beginning of each action while steps are timed."""
        phase = begins(action)
        marks = self._marks
        if phase is None or (marks and marks[-1][0] == phase):
            return
        mark = (phase, time.time_ns())
        if phase == DATA:
            if marks and marks[0][0] == DATA and self.count == self._marked + 1:
                self.steps.append((*marks, mark))
            marks.clear()
            self._marked = self.count
        marks.append(mark)

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
