"""The state of an attempt whose job has ended, from what its ranks recorded and its platform says:
one rule per case, in a table. The first that applies decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distdl.job import JobState
from distdl.runs import failures

SILENT = "it ended without an error message"
DONE = (JobState.SUCCEEDED, JobState.PRUNED)  # it did all that it was to do
ASKED = "it was asked to end, and its ranks ended before they could record it"


@dataclass(frozen=True)
class Ending:
    """What is known of a job that has ended.

    Args:
        recorded: The state that rank 0 has recorded, the last one before the end.
        seen: How it ended according to its platform.
        code: The exit code, if the job ran as one process.
        killed: What ended the job from outside (except a preemption), as a sentence; or empty.
        first: The failure that caused the others; None if no rank has recorded one.
    """

    recorded: JobState
    seen: JobState
    code: int | None = None
    killed: str = ""
    first: dict[str, Any] | None = None

    @property
    def was_asked(self) -> bool:
        """Whether the platform says that the job was asked to end."""
        return self.seen in (JobState.CANCELLED, JobState.PREEMPTED)


@dataclass(frozen=True)
class Conclusion:
    """The state of the attempt, and what is recorded besides.

    Args:
        state: How it has ended.
        ends: Whether this is recorded as its end; no: rank 0 has recorded it.
        fields: Further fields of status.json.
        code: The exit code of the job, as far as it is known.
    """

    state: JobState
    ends: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)
    code: int | None = None


def conclude(ending: Ending) -> Conclusion:
    conclusions = (rule(ending) for rule in RULES)
    return next(each for each in conclusions if each is not None)


def killed_from_outside(ending: Ending) -> Conclusion | None:
    """Unless a rank had failed before by itself, or all was done."""
    if not ending.killed or ending.recorded in DONE:
        return None
    if ending.first and not ending.first.get("lost_peer"):
        return None
    fields = {"error": ending.killed, "killed": True}
    return Conclusion(JobState.FAILED, fields=fields, code=ending.code)


def a_rank_failed(ending: Ending) -> Conclusion | None:
    """Whatever state rank 0 has recorded."""
    if not ending.first:
        return None
    error = f"rank {ending.first['rank']}: {failures.describe(ending.first)}"
    fields = {"error": error, "first_error": failures.facts(ending.first)}
    code = ending.first.get("exit_code", ending.code)
    return Conclusion(JobState.FAILED, fields=fields, code=code)


def recorded_by_rank_0(ending: Ending) -> Conclusion | None:
    """A success is believed only if the exit code does not speak against it."""
    contradicted = ending.recorded in DONE and ending.code and not ending.was_asked
    if not ending.recorded.ended or contradicted:
        return None
    if ending.recorded is JobState.PREEMPTED and ending.seen is JobState.CANCELLED:
        # A worker gets the same signal for a cancel and for a preemption.
        fields = {"state": ending.seen, "exit_code": ending.seen.exit_code}
        return Conclusion(ending.seen, ends=False, fields=fields, code=ending.code)
    return Conclusion(ending.recorded, ends=False, code=ending.code)


def recorded_elsewhere(ending: Ending) -> Conclusion | None:
    """Its files are on another machine."""
    succeeded = ending.seen is JobState.SUCCEEDED and not ending.code
    if ending.recorded is JobState.PENDING and succeeded:
        return Conclusion(ending.seen, code=ending.code)
    return None


def asked_to_end(ending: Ending) -> Conclusion | None:
    if not ending.was_asked:
        return None
    return Conclusion(ending.seen, fields={"error": ASKED}, code=ending.code)


def ended_silently(ending: Ending) -> Conclusion:
    error = f"a worker ended with exit code {ending.code}" if ending.code else SILENT
    return Conclusion(JobState.FAILED, fields={"error": error}, code=ending.code)


RULES: tuple[Callable[[Ending], Conclusion | None], ...] = (
    killed_from_outside,
    a_rank_failed,
    recorded_by_rank_0,
    recorded_elsewhere,
    asked_to_end,
    ended_silently,
)
