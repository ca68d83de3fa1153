"""Whether and when a run that failed is started again: its budget, pauses, the same failure."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from distdl.incident import incident
from distdl.incident.causes import DISK_FULL
from distdl.incident.incident import Incident
from distdl.job import JobState
from distdl.runs.checkpoints import CheckpointStore, age
from distdl.runs.directory import Attempt, RunDirectory, shown
from distdl.util.screen import say
from distdl.util.tail import plain

# Pauses before a start; the first start after progress has none.
FIRST_S = 2.0
LONGEST_S = 60.0
# Causes that lie outside of the program: they may come twice at the same step by chance.
BY_CHANCE = ("killed", "lost host", "connection", "stopped", DISK_FULL)
ROOM = 1 << 20  # bytes that a disk must take before the next start


class Failure(NamedTuple):
    """What is the same if an attempt fails as the one before did."""

    step: int | None
    kind: str
    where: str

    def __str__(self) -> str:
        step = "" if self.step is None else f"at step {self.step} "
        where = f" ({self.where})" if self.where else ""
        return f"{step}with the same error: {self.kind}{where}"


def failure_of(attempt: Attempt, report: Incident | None) -> Failure | None:
    """How an attempt failed; None if it did not, or by chance."""
    first = attempt.first_error()
    if report is None or first is None or report.cause in BY_CHANCE:
        return None
    step = first.get("step")
    where = plain(first.get("where") or report.where)
    return Failure(step if isinstance(step, int) else report.step, plain(first["type"]), where)


class Retries:
    """The further starts of a run.

    Args:
        run: Its newest checkpoint shows whether an attempt made progress, which gives back all
            starts and ends the pauses.
        budget: How many starts without progress are allowed (`launcher.max_attempts`).
    """

    def __init__(self, run: RunDirectory, budget: int) -> None:
        self.run = run
        self.budget = budget
        self.left = budget
        self._step = self._newest_step()
        self._last: Failure | None = None
        self._without_progress = 0

    def again(self, attempt: Attempt, state: JobState) -> bool:
        """Called after an attempt that did not succeed. If it should be started again, waits for
        the time of the pause. A start without room for its files counts, and is not tried."""
        report = incident.read(attempt)
        full = report is not None and report.cause == DISK_FULL
        while (pause := self.pause(attempt, state, report)) is not None:
            after = f" in {pause:.0f} s" if pause else ""
            text = f"{state.lower()}: starting again{after} ({self.left} more)"
            more = f"; {DISK_FULL}: free space until then, {shown(self.run.path)}" if full else ""
            say(text + more, to=sys.stderr)
            time.sleep(pause)
            if not full or has_room(self.run.path):
                return True
        return False

    def pause(self, attempt: Attempt, state: JobState, report: Incident | None) -> float | None:
        """Seconds to wait before the next start; None if there must be none. `report`: the
        attempt's, if it failed. Somebody may free a full disk, which takes a while."""
        failure = failure_of(attempt, report)
        before = self._last
        step = self._newest_step()
        progress = step > self._step
        if progress:
            self.left = self.budget
            self._without_progress = 0
        self._step = max(step, self._step)
        self._last = failure
        if failure and failure == before and not (progress and failure.step is None):
            not_again(attempt, f"it failed twice {failure}")
            return None
        if self.left <= 0:
            if self.budget:
                what = f"launcher.max_attempts={self.budget}, and there was no new checkpoint"
                not_again(attempt, what)
            return None
        self.left -= 1
        if state is JobState.PREEMPTED:
            return 0.0
        self._without_progress += 1
        if report is not None and report.cause == DISK_FULL:
            return LONGEST_S
        return backoff(self._without_progress)

    def _newest_step(self) -> float:
        return max(
            (age(path)[0] for path in CheckpointStore(self.run.checkpoints).all()), default=-1
        )


def not_again(attempt: Attempt, reason: str) -> None:
    """Says why a run is not started again: on the screen and in the report."""
    why = f"not started again: {reason}"
    with suppress(OSError):  # a full disk
        attempt.update(not_restarted=why)
    incident.write(attempt)
    say(why, to=sys.stderr)


def has_room(folder: Path) -> bool:
    """Whether the disk (or quota) of a folder takes ROOM bytes."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM))
    except OSError:
        return False
    return True


def backoff(failures: int) -> float:
    """Seconds before the next start after so many failures without progress: 0, 2, 4, ... 60."""
    return 0.0 if failures < 2 else min(LONGEST_S, FIRST_S * 2.0 ** min(failures - 2, 30))
