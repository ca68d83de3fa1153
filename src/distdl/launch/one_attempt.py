"""One attempt of a run at a time: two of them would write the same checkpoints.

Where nobody can say whether the last one has ended, the next one starts on its user's word alone:
`python -m distdl jobs ended RUN`.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

from distdl.job import JobBase, JobState
from distdl.launch import asking, jobs
from distdl.runs.directory import Attempt, RunDirectory, shown
from distdl.util.errors import UserError


def refuse_second(run: RunDirectory, allow: Sequence[str] = ()) -> None:
    """Refuses an attempt of a run whose last one is under way, or may be.

    Args:
        allow: Packages whose launchers may ask their platform, besides the trusted ones.
    """
    last = run.last_attempt()
    if last is None or jobs.is_settled(last):
        return
    if last.copy_of(last.job()):  # that job writes into the folder of which this is a copy
        return
    state, why = _known(last, jobs.job_of(last, allow))
    if state.ended:
        return
    path = shown(run.path)
    handle = last.job()["handle"]
    if state is JobState.UNKNOWN:
        what = f"attempt {last.number} ({handle}) may be under way still: {why}"
        remedy = f"try again later; or, if you know that it has ended: {say_ended(path)}"
    else:
        what = f"attempt {last.number} is {state.lower()} ({handle})"
        remedy = (
            f"watch it: python -m distdl jobs logs --follow {path}, "
            f"or end it: python -m distdl jobs cancel {path}"
        )
    raise UserError.at(path, what=what, remedy=remedy, code="under-way")


def say_ended(path: str) -> str:
    return f"python -m distdl jobs ended {path}"


def declare_ended(attempt: Attempt, job: JobBase) -> JobState:
    """Records on the user's word that an attempt has ended; returns its state.

    Raises:
        UserError: It waits or runs, as far as its platform or this machine knows.
    """
    if attempt.job():
        state, _ = _known(attempt, job)
    else:
        state = attempt.state()
        elsewhere = attempt.status().get("host") != socket.gethostname()
        state = JobState.UNKNOWN if elsewhere and not state.ended else state
    path = shown(attempt.path.parents[1])
    if state in (JobState.PENDING, JobState.RUNNING):
        raise UserError.at(
            path,
            what=f"attempt {attempt.number} has not ended: it is {state.lower()}",
            remedy=f"end it: python -m distdl jobs cancel {path}",
            code="under-way",
        )
    recorded = attempt.state()
    if recorded.ended:
        attempt.update(concluded=True)
        return recorded
    error = "nobody knows how it ended; its user has said that it has"
    attempt.end(JobState.FAILED, error=error, concluded=True)
    return JobState.FAILED


def _known(attempt: Attempt, job: JobBase) -> tuple[JobState, str]:
    """The state of an attempt that has a job, and "". If its platform does not say whether the job
    is under way: UNKNOWN, and why it does not say."""
    if jobs.is_settled(attempt):
        return attempt.state(), ""
    report = asking.ask(job)
    why = str(report.error or report.why) or "its platform does not say"
    state = jobs.state(attempt, job, replace(report, error=None))
    if state is JobState.PREEMPTED and not report.reached:
        # Its platform may have put it back into the queue.
        return JobState.UNKNOWN, why
    return state, why
