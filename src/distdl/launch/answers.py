"""What commands that start, show or end runs answer to a program (`util/answers.py`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from distdl.incident import incident
from distdl.job import JobBase, JobState
from distdl.launch import jobs
from distdl.runs import checkpoints, failures
from distdl.runs.attempt import moment
from distdl.runs.directory import Attempt, RunDirectory, shown
from distdl.util.tail import plain

ASKED = (JobState.PREEMPTED, JobState.CANCELLED, JobState.PRUNED)
MISSING = "status.json is missing"


@dataclass(frozen=True)
class FailedRank:
    """The rank that failed first; the others usually fail because of it."""

    rank: int | None
    """None: it is not known."""
    cause: str
    """A name from docs/incidents.md, the code of a refusal, or the exception's type."""
    message: str
    """One line."""
    remedy: str
    """What to change; empty if nothing is known."""


@dataclass(frozen=True)
class RunState:
    """A run, as its files and its platform know it."""

    SCHEMA: ClassVar[str] = "run/1"

    run: str
    """The run's folder; empty for a job that was named by its handle alone."""
    attempt: int | None
    """The number of the attempt that the rest is about, from 1; None if nothing was started."""
    state: str
    """PENDING, RUNNING, SUCCEEDED, FAILED, CANCELLED, PREEMPTED, UNKNOWN; PRUNED: a search has
    ended it; or DAMAGED: the run's files cannot be read."""
    job: str
    """The handle, such as slurm://123; for a run on this machine `local` and its host."""
    newest: str = ""
    """The task and state of a later attempt which trains nothing: `Testing: RUNNING`."""
    url: str = ""
    """Where the platform shows the job; empty if it does not."""
    reasons: Sequence[str] = ()
    """Why the state is what it is, if it is not a plain success or failure."""
    started: float | None = None
    """Seconds since 1970; None if it is not recorded."""
    ended: float | None = None
    """Seconds since 1970; None if it has not ended."""
    restarts: int = 0
    """How often its platform started the attempt again."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The last value of each; "nan", "inf" and "-inf" are texts."""
    checkpoint: str = ""
    """The best, or else the last one; empty if there is none here."""
    error: FailedRank | None = None
    next: str = ""
    """The command to type next; empty if nothing is left to do."""


@dataclass(frozen=True)
class RunStates:
    """Several runs."""

    SCHEMA: ClassVar[str] = "runs/1"

    runs: Sequence[RunState]
    notes: Sequence[str] = ()
    """About all of them: a platform that was not asked."""


@dataclass(frozen=True)
class SweepMember:
    """A run of a sweep."""

    overrides: str
    """Its values of the swept keys: `seed=1 optimizer.lr=0.1`."""
    best: bool
    """Whether its metric is the best of those that succeeded."""
    run: RunState


@dataclass(frozen=True)
class SweepState:
    """A sweep, after its command has done what it can."""

    SCHEMA: ClassVar[str] = "sweep/1"

    members: Sequence[SweepMember]
    again: str
    """The command that starts the members which have not succeeded."""


@dataclass(frozen=True)
class ShownRequest:
    """What would be started (`dry_run=true`)."""

    SCHEMA: ClassVar[str] = "request/1"

    runs: Sequence[str]
    """The folder of each run, which does not exist yet unless it is resumed."""
    text: str
    """What people are shown: sizes, what is left out, and the platform's request."""


@dataclass(frozen=True)
class Configs:
    """Composed configs (`--cfg`)."""

    SCHEMA: ClassVar[str] = "configs/1"

    configs: Sequence[Any]
    """One; with -m that of each run. `${...}` are texts, unless --resolve is typed."""


@dataclass(frozen=True)
class Asked:
    """What became of each job that a command acted on."""

    SCHEMA: ClassVar[str] = "jobs/1"

    done: Mapping[str, str]
    """By the job's handle: `asked to end`, `succeeded already`, the state at its end, or the folder
    with its files."""


@dataclass(frozen=True)
class Log:
    """The log of a run. Its lines came before, as events `line` with a `text`."""

    SCHEMA: ClassVar[str] = "log/1"

    job: str
    """Its handle."""


def state_of(
    job: JobBase | None, attempt: Attempt | None, state: JobState, why: str = ""
) -> RunState:
    """A job and its attempt.

    Args:
        job: None for an attempt whose own files say all.
        attempt: None if the user named the job by its handle alone.
        why: Why its platform does not say more, or why the job waits.
    """
    unsure = state in (JobState.UNKNOWN, JobState.PENDING) or isinstance(job, jobs.Unqueried)
    why = plain(why) if unsure else ""
    if attempt is None:
        assert job is not None
        url = plain(job.url or "")
        reasons = [why] if why else []
        return RunState("", None, str(state), plain(job.handle), url=url, reasons=reasons)
    url = plain((job.url if job else attempt.job().get("url")) or "")
    facts = attempt.status()
    recorded = facts.get("state")
    original = "" if recorded == state else attempt.copy_of(facts)
    copied = f"this folder is a copy of {plain(original)}, which was {recorded}" if original else ""
    # Whoever asked it to end, and at which step, is no failure.
    asked = plain(str(facts.get("error") or "")) if state in ASKED else ""
    run = RunDirectory(attempt.path.parents[1])
    checkpoint = checkpoints.best_or_last(run.checkpoints)
    report = incident.read(attempt)
    return RunState(
        run=plain(shown(run.path)),
        attempt=attempt.number,
        state=str(state),
        job=plain(where_of(attempt)),
        url=url,
        reasons=[each for each in (why, "" if facts else MISSING, copied, asked) if each],
        started=moment(facts.get("started")),
        ended=moment(facts.get("ended")),
        restarts=int(facts.get("restarts") or 0),
        metrics=facts.get("metrics") or {},
        checkpoint=plain(shown(checkpoint)) if checkpoint.exists() else "",
        error=None if asked else failure_of(attempt, report),
        next=next_of(run, state, report),
    )


def next_of(run: RunDirectory, state: JobState, report: incident.Incident | None) -> str:
    """The command that continues a run, or looks at it; empty while it is under way."""
    folder = shlex.quote(plain(shown(run.path)))
    if report is not None:
        return plain(report.next)
    if state in (*ASKED, JobState.FAILED):
        return f"python -m distdl resume {folder}"
    return f"python -m distdl report {folder}" if state is JobState.SUCCEEDED else ""


def failure_of(attempt: Attempt, report: incident.Incident | None) -> FailedRank | None:
    """How an attempt failed; None if it did not, or nothing is known of it.

    Args:
        report: What its files tell of it.
    """
    if report is not None:
        return FailedRank(report.rank, report.cause, plain(report.title), plain(report.remedy))
    if first := attempt.first_error():
        refused = failures.problems(first)
        if refused:
            why = refused[0]
            message = f"{why.path}: {why.what}" if why.path else why.what
            return FailedRank(first["rank"], plain(why.code), plain(message), plain(why.remedy))
        kind = plain(str(first.get("type") or ""))
        return FailedRank(first["rank"], kind, plain(failures.describe(first)), "")
    error = attempt.status().get("error")
    return FailedRank(None, "", plain(str(error)), "") if error else None


def where_of(attempt: Attempt) -> str:
    """The handle of the attempt's job. Without one: the local host, or "not submitted"."""
    if handle := attempt.job().get("handle"):
        return str(handle)
    target = str(attempt.launch()["where"]["launcher"].get("_target_", ""))
    if target.startswith("distdl.launchers.local.") or not target:
        host = attempt.status().get("host")
        return f"local, {host}" if host else "local"
    return f"{target.removeprefix('distdl.launchers.').partition('.')[0]}, not submitted"


def ended(run: RunDirectory) -> RunState:
    """A run whose command has ended."""
    last = run.last_attempt()
    if last is None:
        return RunState(plain(shown(run.path)), None, str(JobState.PENDING), "")
    return state_of(None, last, last.state())
