"""A training that ends on the clock: the time that is used, and the steps that the rest allows.

Time is that of `trainer.max_time`: all of a training, its validations and what lies between epochs,
over all attempts. Two things are estimated from it apart, since a validation is long and rare: how
long a step takes, and how long and how frequent a pause between two steps is. So no validation
makes the rest look shorter or longer than it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

MICRO = 1_000_000
SETTLING = 2  # intervals between a run's first steps, which compile, and are not counted
RECENT = 100  # steps that the mean goes by
PAUSES = 4  # pauses that the mean goes by
LONGEST = 5.0  # times the mean that a step counts for: one that waited says nothing of the others


class StepsLeft(Protocol):
    """What a schedule that takes `budget` gets, if `trainer.max_time` is set."""

    @property
    def seconds(self) -> float:
        """The whole time."""

    @property
    def steps_left(self) -> float:
        """Optimizer steps that the time allows after the one that is being taken; infinity: it is
        too early to say. An estimate, the same on all ranks."""


@dataclass
class Pace:
    """How fast a training is: what a checkpoint keeps of it. Times are in seconds.

    Args:
        step: The mean of the latest steps; None: too early to say.
        intervals: Between steps without a pause, that were seen.
        pause: The mean of the latest pauses.
        every: Steps between two pauses, their mean.
        pauses: That were seen.
        paused_at: The step after which the latest pause was.
    """

    step: float | None = None
    intervals: int = 0
    pause: float = 0.0
    every: float = math.inf
    pauses: int = 0
    paused_at: int = 0

    def learn(self, seconds: float, steps: int) -> None:
        """From steps that followed each other."""
        self.intervals += 1
        if self.intervals <= SETTLING:
            return
        each = seconds / steps
        if self.step is None:
            self.step = each
            return
        counted = min(each, LONGEST * self.step)
        self.step += (counted - self.step) / min(self.intervals - SETTLING, RECENT)

    def learn_pause(self, seconds: float, steps: int, after: int) -> None:
        """From `steps` steps with a pause among them, which came after step `after`."""
        since = after - self.paused_at
        self.paused_at = after
        if self.step is None or since <= 0:
            return
        self.pauses += 1
        long = max(0.0, seconds - steps * self.step)
        if self.pauses == 1:
            self.pause = long
            self.every = float(since)
            return
        share = 1 / min(self.pauses, PAUSES)
        self.pause += (long - self.pause) * share
        self.every += (since - self.every) * share

    def steps_in(self, seconds: float, since_pause: int) -> float:
        """How many steps fit into a time that begins so many steps after the latest pause."""
        if self.step is None:
            return math.inf
        until_pause = max(0.0, self.every - since_pause)
        if seconds <= until_pause * self.step:
            return max(0.0, seconds / self.step)
        rest = seconds - until_pause * self.step - self.pause
        if rest <= 0:  # it ends in a pause
            return until_pause
        turn = self.every * self.step + self.pause
        turns, rest = divmod(rest, turn)
        return until_pause + turns * self.every + min(self.every, rest / self.step)


@dataclass(frozen=True)
class Reading:
    """A look at the clock, which ranks exchange as plain numbers.

    Args:
        used: Microseconds of the training's time, of rank 0's clock; 0: of no other's.
        step: Optimizer steps that are done.
        paused: Whether there was a pause since the step before.
    """

    used: int = 0
    step: int = 0
    paused: bool = False

    @classmethod
    def of(cls, numbers: Sequence[int] | None) -> Reading:
        """From `numbers`; none of them: no reading."""
        used, step, paused = numbers or (0, 0, 0)
        return cls(int(used), int(step), bool(paused))

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.used, self.step, int(self.paused)


class UsedTime:
    """The time that a training has used since it had a limit first, in all attempts, also in those
    without one. A training that never had a limit is not timed: its checkpoints are equal to those
    of another one.

    Args:
        clock: In seconds, from any moment on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_kept = False
        self._clock = clock
        self._before = 0  # microseconds of earlier attempts
        self._began: float | None = None

    @property
    def used(self) -> int:
        """Microseconds, by this rank's clock."""
        here = 0.0 if self._began is None else self._clock() - self._began
        return self._before + round(here * MICRO)

    @property
    def seconds_used(self) -> float:
        return self.used / MICRO

    @property
    def has_begun(self) -> bool:
        return self._began is not None

    def begin(self) -> None:
        """The training begins, or goes on."""
        self._began = self._clock()

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint, as plain numbers; rank 0's is everybody's. None: nothing is kept."""
        return {"used": self.used} if self.is_kept else None

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from where `state` was taken, which may be that of a `TimeBudget`."""
        self._before = int(state["used"])
        self.is_kept = self.is_kept or self._before > 0


class TimeBudget(UsedTime):
    """`trainer.max_time` of a run.

    Each rank looks at its own clock; what counts is `agreed`, which is called on every rank with
    the same readings of rank 0. All numbers but `used` follow from these alone.

    Args:
        seconds: The whole time.
        clock: In seconds, from any moment on.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self.is_kept = True
        self.seconds = seconds
        self.pace = Pace()
        self._paused = False  # since the latest look
        self._looked = Reading()  # the latest look, which ranks may not know yet
        self._known = Reading()  # the latest that they know
        self._learnt = Reading()  # the latest of another step, from which the pace was learnt
        self._pause_known = False  # since that one
        self._open = Reading()  # what no rank had got when the checkpoint was saved
        self._doing = 0

    def pause(self) -> None:
        """Something other than a step takes time now."""
        self._paused = True

    def begin_step(self, done: int) -> None:
        """The next step begins, after `done` others."""
        self._doing = done + 1

    def look(self, step: int) -> Reading:
        """A reading of this rank's clock after a step."""
        self._looked = Reading(max(1, self.used), step, self._paused)
        self._paused = False
        return self._looked

    def agreed(self, reading: Reading) -> None:
        """A reading of rank 0's clock, which all ranks get in the same order. One whose `used` is 0
        stands for none."""
        reading = reading if reading.used else self._open
        self._open = Reading()
        if not reading.used:
            return
        self._known = reading
        self._pause_known = self._pause_known or reading.paused
        last = self._learnt
        steps = reading.step - last.step
        if last.used and steps <= 0:
            return
        took = (reading.used - last.used) / MICRO
        if last.used and self._pause_known:
            self.pace.learn_pause(took, steps, reading.step - 1)
        elif last.used:
            self.pace.learn(took, steps)
        self._learnt = reading
        self._pause_known = False

    def left(self) -> float:
        """Seconds that are left after the step that is being taken, as all ranks know it."""
        since = max(0, self._doing - self._known.step) * (self.pace.step or 0.0)
        return self.seconds - (self._known.used or self._before) / MICRO - since

    @property
    def steps_left(self) -> float:
        done = max(self._doing, self._known.step)
        paused_at = self._known.step if self._pause_known else self.pace.paused_at
        return self.pace.steps_in(self.left(), done - paused_at)

    @property
    def is_over(self) -> bool:
        """Whether less than half a step is left."""
        return self.left() <= (self.pace.step or 0.0) / 2

    # ------------------------------------------------------------------------ in a checkpoint

    def state(self) -> dict[str, Any]:
        return {
            "used": self.used,
            "pace": asdict(self.pace),
            "known": [*self._known.numbers],
            "learnt": [*self._learnt.numbers],
            "pause_known": self._pause_known,
            "paused": self._paused,
            "open": [*self._looked.numbers] if self._looked != self._known else None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """As of `UsedTime`, whose state has no more than `used`."""
        super().load(state)
        self.pace = Pace(**state.get("pace", {}))
        self._known = Reading.of(state.get("known"))
        self._learnt = Reading.of(state.get("learnt"))
        self._pause_known = bool(state.get("pause_known"))
        self._paused = bool(state.get("paused"))
        self._open = Reading.of(state.get("open"))
        self._doing = self._known.step
