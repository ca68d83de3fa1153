"""The state of runs as text: the lines of `jobs status` and the rows of `jobs list`."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distdl.incident import incident
from distdl.job import JobBase, JobState
from distdl.launch import asking, jobs
from distdl.launch.answers import RunState, state_of
from distdl.launch.asking import Report
from distdl.runs.directory import Attempt, RunDirectory, shown
from distdl.util.errors import Damaged, UserError
from distdl.util.tail import plain

Row = tuple[str, ...]  # of COLUMNS
COLUMNS = ("run", "attempt", "state", "where", "started", "metrics")
ENDED = [str(state) for state in JobState if state.ended]
LONGEST = 200  # characters of a reason in a row; `jobs status` has all of it


def lines(known: RunState, attempt: Attempt | None) -> Iterator[str]:
    """All lines about one job; `attempt` is None if the user named it by its handle alone."""
    if attempt is None:
        yield f"{known.state}  {known.job}" + "".join(f"  ({why})" for why in known.reasons)
        return
    restarts = f", restarted {known.restarts} times" if known.restarts else ""
    yield f"{known.run}  (attempt {known.attempt})"
    yield f"  state   {known.state}{restarts}"
    yield from (f"  because {reason}" for reason in known.reasons)
    yield f"  job     {known.job}"
    if known.url:
        yield f"  watch   {known.url}"
    for name, moment in (("started", known.started), ("ended", known.ended)):
        if moment:
            yield f"  {name:7} {time.ctime(moment)}"
    if report := incident.read(attempt):
        yield f"  error   {incident.head(report)}"
    elif known.error and known.error.rank is not None:
        yield f"  error   rank {known.error.rank}: {known.error.message}"
    elif known.error:
        yield f"  error   {known.error.message}"


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

    def listed(self) -> RunState:
        """What is known of the run. A run that cannot be read hides no other."""
        run = plain(shown(self.run.path))
        number = self.attempt.number
        try:
            if self.error is not None:
                raise self.error
            newest = self.state(self.attempt)
            self.run.check_config()
            self.attempt.check_launch()
            attempt = self.main
            known = self.state(attempt)
            why = self.reports[attempt.number].why if attempt.number in self.reports else ""
            found = state_of(self.jobs.get(attempt.number), attempt, known, why)
            if attempt.number == number:
                return found
            # The newest attempt only tested, and the training is shown.
            task = self.attempt.task.rpartition(".")[2] or "unknown task"
            return replace(found, newest=f"{plain(task)}: {newest}")
        except Damaged as damaged:
            problem = damaged.problems[0]
            what = plain(f"{shown(Path(problem.path))} {problem.what}")
            return RunState(run, number, "DAMAGED", "?", reasons=[what])
        except Exception as error:  # any file of it may be anything
            what = f"{type(error).__name__}: {in_short(str(error))}"
            return RunState(run, number, str(JobState.UNKNOWN), "?", reasons=[plain(what)])


def row(known: RunState) -> Row:
    started = known.started
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if started else ""
    # Why a run has ended as it has is in `jobs status`; its metrics are here.
    why = "" if known.state in ENDED and known.metrics else "".join(known.reasons[:1])
    last = in_short(why) or metrics_text(known.metrics)
    state = f"{known.state} ({known.newest})" if known.newest else known.state
    return (known.run, str(known.attempt), state, known.job, date, last)


def listed(folder: Path, notes: dict[str, None]) -> Iterator[list[RunState]]:
    """All runs of a folder: soon those whose platform answers soon or is not asked, the
    newest first, then the others as their platforms answer or are given up.

    Args:
        notes: Gets the notes about the runs, each once.
    """
    runs = jobs.runs_below(folder)
    if not runs:
        raise UserError.at(
            str(folder),
            what="has no runs",
            remedy="python -m distdl jobs list DIR",
            code="not-found",
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
        yield [line.listed() for line in sorted(complete, key=ListedRun.is_unanswered)]
        left = [line for line in left if not line.complete]


def in_short(reason: str) -> str:
    """The first line of a reason, without what to do about it."""
    return textwrap.shorten(reason.partition("\n")[0], LONGEST, placeholder=" ...")


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """The main metrics as text, including NaN and infinity: `val/loss 0.5`."""
    shown = ((k, v) for k, v in sorted(metrics.items()) if k.startswith(("val", "train")))
    return "  ".join(f"{k} {float(v):.4g}" for k, v in shown)
