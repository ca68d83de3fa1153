"""The state of runs as text: the lines of `jobs status` and the rows of `jobs list`."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distdl.incident import incident
from distdl.job import JobBase, JobState
from distdl.launch import asking, jobs
from distdl.launch.asking import Report
from distdl.runs import failures
from distdl.runs.directory import Attempt, RunDirectory, shown
from distdl.util.errors import Damaged, UserError
from distdl.util.tail import plain

Row = tuple[str, ...]  # of COLUMNS
COLUMNS = ("run", "attempt", "state", "where", "started", "metrics")
MISSING = "status.json is missing"
LONGEST = 200  # characters of a reason in a row; `jobs status` has all of it


def lines(job: JobBase, attempt: Attempt | None, state: JobState, why: str = "") -> Iterator[str]:
    """All lines about one job.

    Args:
        attempt: None if the user named the job by its handle alone.
        why: Why its platform does not say more, or why the job waits.
    """
    unsure = state in (JobState.UNKNOWN, JobState.PENDING) or isinstance(job, jobs.Unqueried)
    why = plain(why) if unsure else ""
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


class ListedRun:
    """A run of `jobs list`, whose row is complete once its platform has answered."""

    def __init__(self, run: RunDirectory, platforms: jobs.Platforms) -> None:
        self.run = run
        self.attempt = jobs.attempt_of(run)
        self.main = self.attempt
        self.jobs: dict[int, JobBase] = {}  # by the number of the attempt, as are the reports
        self.reports: dict[int, Report] = {}
        self.error: Exception | None = None
        try:
            self.main = run.main_attempt() or self.attempt
            for attempt in (self.attempt, self.main):
                if not jobs.is_settled(attempt):
                    self.jobs[attempt.number] = platforms.job(attempt)
        except Exception as error:  # its row shows it
            self.error = error
            self.jobs = {}

    @property
    def complete(self) -> bool:
        return self.jobs.keys() == self.reports.keys()

    def is_unanswered(self) -> bool:
        return any(not report.reached for report in self.reports.values())

    def state(self, attempt: Attempt) -> JobState:
        number = attempt.number
        return jobs.state(attempt, self.jobs.get(number), self.reports.get(number))

    def row(self) -> Row:
        attempt = self.attempt
        try:
            if self.error is not None:
                raise self.error
            known = self.state(attempt)
            state = str(known)
            number = attempt.number
            self.run.check_config()
            attempt.check_launch()
            if self.main.number != number:  # the newest attempt only tested: show the training
                task = attempt.task.rpartition(".")[2] or "unknown task"
                known = self.state(self.main)
                attempt = self.main
                state = f"{known} ({task}: {state})"
            facts = attempt.status()
            started = time_of(facts, "started")
            date = time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if started else ""
            last = metrics_text(facts) if facts else MISSING
            unsure = known in (JobState.UNKNOWN, JobState.PENDING)
            if unsure and attempt.number in self.reports:
                last = in_short(self.reports[attempt.number].why) or last
            cells = (where_of(attempt), date, last)
        except Damaged as damaged:
            file, what = damaged.problems[0].path, damaged.problems[0].what
            state = "DAMAGED"
            cells = ("?", "", f"{shown(Path(file))} {what}")
        except Exception as error:  # one run that cannot be read must not hide the others
            state = f"UNKNOWN ({type(error).__name__})"
            cells = ("?", "", in_short(str(error)))
        return tuple(map(plain, (shown(self.run.path), attempt.number, state, *cells)))


def tables(folder: Path, notes: dict[str, None]) -> Iterator[list[Row]]:
    """The rows of all runs of a folder: soon those whose platform answers soon or is not asked, the
    newest first, then the others as their platforms answer or are given up.

    Args:
        notes: Gets the notes about the rows, each once.
    """
    runs = jobs.runs_below(folder)
    if not runs:
        raise UserError.at(
            str(folder), "has no runs", "python -m distdl jobs list DIR", code="not-found"
        )
    platforms = jobs.Platforms()
    left = [ListedRun(run, platforms) for run in runs]
    every = [job for line in left for job in line.jobs.values()]
    notes |= dict.fromkeys(job.why for job in every if isinstance(job, jobs.Unqueried))
    asked = [(line, number) for line in left for number in line.jobs]
    for block in asking.blocks([line.jobs[number] for line, number in asked]):
        for position, report in block.items():
            line, number = asked[position]
            line.reports[number] = report
        complete = [line for line in left if line.complete]
        yield [line.row() for line in sorted(complete, key=ListedRun.is_unanswered)]
        left = [line for line in left if not line.complete]


def in_short(reason: str) -> str:
    """The first line of a reason, without what to do about it."""
    return textwrap.shorten(reason.partition("\n")[0], LONGEST, placeholder=" ...")


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
