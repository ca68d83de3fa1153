"""The state of runs as text: the lines of `jobs status` and the rows of `jobs list`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distdl.health import incident
from distdl.job import Job, JobState
from distdl.launch import jobs
from distdl.runs import failures
from distdl.runs.directory import Attempt, RunDirectory, shown
from distdl.runs.files import Damaged
from distdl.util.errors import UserError
from distdl.util.tail import plain

COLUMNS = ("run", "attempt", "state", "where", "started", "metrics")
MISSING = "status.json is missing"


def state_of(job: Job, attempt: Attempt | None) -> JobState:
    return jobs.state(attempt, job) if attempt else job.state()


def lines(job: Job, attempt: Attempt | None, state: JobState) -> Iterator[str]:
    """All lines about one job. `attempt` is None if the user named the job by its handle alone."""
    unknown = state is JobState.UNKNOWN or isinstance(job, jobs.Unqueried)
    why = plain(getattr(job, "why", "")) if unknown else ""
    if attempt is None:
        yield f"{state}  {job.handle}" + (f"  ({why})" if why else "")
        return
    facts = attempt.status()
    restarts = f", restarted {facts['restarts']} times" if facts.get("restarts") else ""
    yield f"{shown(attempt.path.parents[1])}  (attempt {attempt.number})"
    yield f"  state   {state}{restarts}"
    recorded = facts.get("state")
    copied = "" if recorded == state else attempt.copy_of(facts)
    copied = copied and f"this folder is a copy of {plain(copied)}, which was {recorded}"
    reasons = why, "" if facts else MISSING, copied
    yield from (f"  because {reason}" for reason in reasons if reason)
    yield f"  job     {plain(where_of(attempt))}"
    if job.url:
        yield f"  watch   {plain(job.url)}"
    for name in ("started", "ended"):
        if moment := time_of(facts, name):
            yield f"  {name:7} {time.ctime(moment)}"
    if report := incident.read(attempt):
        yield f"  error   {incident.head(report)}"
    elif first := attempt.first_error():
        yield f"  error   rank {plain(first['rank'])}: {plain(failures.describe(first))}"
    elif facts.get("error"):
        yield f"  error   {plain(facts['error'])}"


def table(folder: Path) -> tuple[list[tuple[str, ...]], list[str]]:
    """A row of COLUMNS for every run of a folder, and notes about the rows."""
    runs = jobs.runs_below(folder)
    if not runs:
        raise UserError.at(str(folder), "has no runs", "python -m distdl jobs list DIR")
    platforms = jobs.Platforms()
    entries: list[tuple[RunDirectory, Attempt, Job | Exception | None]] = []
    for run in runs:
        attempt = jobs.attempt_of(run)
        job: Job | Exception | None
        try:
            job = None if jobs.is_settled(attempt) else platforms.job(attempt)
        except Exception as error:  # its row shows it
            job = error
        entries.append((run, attempt, job))
    jobs.query_all(job for _, _, job in entries if job and not isinstance(job, Exception))
    rows = [_row(*each) for each in entries]
    return rows, list(dict.fromkeys(j.why for _, _, j in entries if isinstance(j, jobs.Unqueried)))


def _row(run: RunDirectory, attempt: Attempt, job: Job | Exception | None) -> tuple[str, ...]:
    try:
        if isinstance(job, Exception):
            raise job
        state = str(jobs.state(attempt, job))
        run.check_config()
        attempt.check_launch()
        main = run.main_attempt() or attempt
        if main.number != attempt.number:  # the newest attempt only tested, so show the training
            task = attempt.task.rpartition(".")[2] or "unknown task"
            state = f"{jobs.state(main)} ({task}: {state})"
            attempt = main
        facts = attempt.status()
        started = time_of(facts, "started")
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if started else ""
        cells = (where_of(attempt), date, metrics_text(facts) if facts else MISSING)
    except Damaged as damaged:
        file, what = damaged.problems[0].path, damaged.problems[0].what
        state, cells = "DAMAGED", ("?", "", f"{shown(Path(file))} {what}")
    except Exception as error:  # one run that cannot be read must not hide the others
        reason = str(error).partition("\n")[0]
        state, cells = f"UNKNOWN ({type(error).__name__})", ("?", "", reason)
    return tuple(map(plain, (shown(run.path), attempt.number, state, *cells)))


def where_of(attempt: Attempt) -> str:
    """The handle of the attempt's job. Without one: the local host, or "not submitted"."""
    if handle := attempt.job().get("handle"):
        return str(handle)
    target = str(attempt.launch()["where"]["launcher"].get("_target_", ""))
    if target.startswith("distdl.launchers.local.") or not target:
        host = attempt.status().get("host")
        return f"local, {host}" if host else "local"
    return f"{target.removeprefix('distdl.launchers.').partition('.')[0]}, not submitted"


def time_of(facts: Mapping[str, Any], name: str) -> float | None:
    """Seconds since 1970; None if it is not recorded, or too large for a date."""
    moment = facts.get(name)
    return float(moment) if moment and abs(moment) < 1e11 else None


def metrics_text(facts: Mapping[str, Any]) -> str:
    """The main metrics in a status as text, including NaN and infinity: `val/loss 0.5`."""
    metrics = sorted((facts.get("metrics") or {}).items())
    return "  ".join(f"{k} {float(v):.4g}" for k, v in metrics if k.startswith(("val", "train")))
