"""`python -m distdl jobs ...`: what became of runs, wherever they are, from any later shell."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from distdl import failures, jobs
from distdl.errors import Problem, UserError
from distdl.job import Job, JobState
from distdl.run_directory import Attempt, RunDirectory, shown
from distdl.run_files import Damaged
from distdl.tailing import plain, tail

VERBS = {
    "list": "the runs of a folder and how they stand",
    "status": "how a run stands",
    "logs": "its log; with --follow, until it has ended",
    "wait": "until it has ended",
    "cancel": "end it, with time for a checkpoint",
    "resubmit": "start it again where it was, at the same place",
    "fetch": "copy what a job on Azure or AWS has written so far",
}


def main(argv: Sequence[str]) -> int:
    """One verb on one run, one job (by its handle) or all runs of a folder.

    Returns:
        status: 0, or 1 if the place cannot say. wait and logs --follow: the run's own exit code.

    Raises:
        UserError: There is no such run or job, or the verb does not apply to it.
    """
    options = parse(argv)
    if options.verb == "list":
        return list_runs(Path(options.target or "outputs"))
    if options.verb == "resubmit":
        return resubmit(options.target, options.overrides)
    found = targets(options.target, options.attempt, allowed(options.overrides))
    if options.verb == "status":
        return status(found)
    if options.verb == "cancel":
        return cancel(found)
    if options.verb == "fetch":
        return fetch(found, options.to)
    if len(found) > 1 and options.verb == "logs":
        raise UserError(Problem(options.target, f"has {len(found)} runs", "name one of them"))
    return max(
        [show_logs(*one, options.follow) if options.verb == "logs" else wait(*one) for one in found]
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m distdl jobs", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text)
        if name == "list":
            verb.add_argument("target", nargs="?", metavar="FOLDER", help="default: outputs")
            continue
        verb.add_argument("target", metavar="RUN", help="a run's folder, or slurm://123")
        verb.set_defaults(attempt=None, overrides=[])
        if name == "resubmit":
            verb.add_argument("overrides", nargs="*", help="as of `resume`: trainer.max_epochs=20")
        else:
            verb.add_argument(
                "overrides", nargs="*", help="project.allow=[PACKAGE]: a launcher's that you trust"
            )
            verb.add_argument("--attempt", type=int, metavar="N", help="default: the newest")
        if name == "logs":
            verb.add_argument("--follow", "-f", action="store_true")
        if name == "fetch":
            verb.add_argument("--to", type=Path, help="default: the run's own folder")
    return parser.parse_args(argv)


MISSING = "status.json is missing"

Target = tuple[Job, Attempt | None]


def allowed(overrides: Sequence[str]) -> list[str]:
    """What `project.allow=[...]` on the command line allows, for this command.

    Raises:
        UserError: Another setting: whoever looks at a run changes none.
    """
    from distdl import compose

    names: list[str] = []
    for override in compose.parse_overrides(overrides):
        value = override.value()
        if override.key_or_group != "project.allow" or not isinstance(value, list):
            remedy = "project.allow=[PACKAGE]; `resume` and `jobs resubmit` change settings"
            raise UserError(Problem(str(override.input_line), "changes nothing here", remedy))
        names += map(str, value)
    return names


def targets(text: str, number: int | None, allow: Sequence[str] = ()) -> list[Target]:
    """What a user named: a handle, a run, or all the runs of a folder (a sweep)."""
    if "://" in text:
        return [(jobs.named(text), None)]
    folder = Path(text)
    below = [] if (folder / "config.yaml").is_file() else jobs.runs_below(folder)
    runs = below or [RunDirectory.open(text)]
    attempts, places = [attempt_of(run, number) for run in runs], jobs.Places(allow)
    return [(places.job(attempt), attempt) for attempt in attempts]


def attempt_of(run: RunDirectory, number: int | None) -> Attempt:
    chosen = {a.number: a for a in run.attempts()}
    if not chosen:
        remedy = f"start it, or go on with it: python -m distdl resume {shown(run.path)}"
        raise UserError(Problem(shown(run.path), "has no attempt on record", remedy))
    if number is not None and number not in chosen:
        raise UserError(Problem("--attempt", f"there is no {number}", f"1 to {max(chosen)}"))
    return chosen[number or max(chosen)]


def state_of(job: Job, attempt: Attempt | None) -> JobState:
    return jobs.state(attempt, job) if attempt else job.state()


def status(found: list[Target]) -> int:
    jobs.ask(job for job, attempt in found if not (attempt and jobs.is_settled(attempt)))
    unknown = False
    problems: list[Problem] = []
    for job, attempt in found:
        state = state_of(job, attempt)
        unknown |= state is JobState.UNKNOWN
        unasked = state is JobState.UNKNOWN or isinstance(job, jobs.Unasked)
        why = getattr(job, "why", "") if unasked else ""
        if attempt is None:
            print(f"{state}  {job.handle}" + (f"  ({why})" if why else ""))
            continue
        facts = attempt.status()
        print(f"{shown(attempt.path.parents[1])}  (attempt {attempt.number})")
        print(f"  state   {state}" + (f", restarted {n} times" if (n := restarts(attempt)) else ""))
        if why:
            print(f"  because {plain(why)}")
        if not facts:
            print(f"  because {MISSING}")
        print(f"  job     {plain(attempt.job().get('handle') or jobs.place_of(attempt))}")
        if job.url:
            print(f"  watch   {plain(job.url)}")
        for name in ("started", "ended"):
            if when := number(facts.get(name)):
                print(f"  {name:7} {time.ctime(when)}")
        first = attempt.first_error()
        if first:
            print(f"  error   rank {plain(first['rank'])}: {plain(failures.told(first))}")
        elif facts.get("error"):
            print(f"  error   {plain(facts['error'])}")
        try:
            RunDirectory(attempt.path.parents[1]).check_config()
        except Damaged as damaged:  # how it stands is known all the same
            problems += damaged.problems
    if problems:
        raise UserError(*problems)
    return 1 if unknown else 0


def restarts(attempt: Attempt) -> int:
    return int(number(attempt.status().get("restarts")) or 0)


def number(value: object) -> float | None:
    """A number of a file; None for anything else that stands there."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e11 else None  # type: ignore[arg-type]


def is_no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def show_logs(job: Job, attempt: Attempt | None, follow: bool) -> int:
    if follow and attempt is not None and not isinstance(job, jobs.Unasked):
        from distdl.following import follow as follow_job

        state = follow_job(job, attempt)
        return 0 if state is None else state.exit_code
    try:
        for line in job.logs(follow=follow):
            print(plain(line), flush=True)
    except UserError:
        # A scheduler forgets a job after minutes; what rank 0 wrote is in the run, if it is here.
        kept = attempt.logs / "rank_0.log" if attempt else None
        if kept is None or not kept.exists():
            raise
        print(f"{plain(getattr(job, 'why', '')) or f'{job.handle} is gone'}; {shown(kept)}:")
        for line in tail(kept, lambda: False):
            print(plain(line), flush=True)
    return job.state().exit_code if follow else 0


def wait(job: Job, attempt: Attempt | None) -> int:
    job.wait()
    state = state_of(job, attempt)
    print(f"{state}  {job.handle}", flush=True)
    return state.exit_code


def cancel(found: list[Target]) -> int:
    for job, attempt in found:
        state = state_of(job, attempt)
        if state.ended:
            print(f"{job.handle}: {state.lower()} already")
        else:
            job.cancel()
            print(f"{job.handle}: asked to end; its checkpoint is being written")
    return 0


def resubmit(target: str, overrides: Sequence[str]) -> int:
    from distdl import launch
    from distdl.commands import resume

    planned = resume.plan(RunDirectory.open(target), list(overrides))
    if planned.config.dry_run:
        print(launch.render(planned))
        return 0
    return launch.start(planned, sys.argv)


def fetch(found: list[Target], to: Path | None) -> int:
    for job, attempt in found:
        copy: Callable[[Path], None] | None = getattr(job, "fetch", None)
        if copy is None:
            print(f"{job.handle}: its files are here already")
            continue
        target = to or (attempt.path.parents[1] if attempt else Path.cwd())
        copy(target)
        print(f"{job.handle}: fetched into {shown(target)}")
    return 0


def list_runs(folder: Path) -> int:
    runs = jobs.runs_below(folder)
    if not runs:
        raise UserError(Problem(str(folder), "there are no runs", "python -m distdl jobs list DIR"))
    attempts, places = [attempt_of(run, None) for run in runs], jobs.Places()
    asked: dict[Attempt, Job] = {}
    for attempt in attempts:
        with suppress(Exception):  # its row says what is wrong with it
            if not jobs.is_settled(attempt):
                asked[attempt] = places.job(attempt)
    jobs.ask(asked.values())
    rows = [("run", "attempt", "state", "where", "started", "metrics")]
    unasked: dict[str, None] = {}
    for run, attempt in zip(runs, attempts, strict=True):
        try:
            settled = jobs.is_settled(attempt)
            job = None if settled else asked.get(attempt) or places.job(attempt)
            state = str(jobs.state(attempt, job))
            run.check_config()
            attempt.check_launch()
            if isinstance(job, jobs.Unasked):
                unasked[job.why] = None
            main = run.main_attempt() or attempt
            if main.number != attempt.number:  # how a test ended says nothing of the training
                state = f"{jobs.state(main)} ({attempt.task.rpartition('.')[2]}: {state})"
                attempt = main
            cells = (attempt.job().get("handle") or jobs.place_of(attempt), *facts_of(attempt))
        except Damaged as damaged:
            file, what = damaged.problems[0].path, damaged.problems[0].what
            state, cells = "DAMAGED", ("?", "", f"{shown(Path(file))} {what}")
        except Exception as error:  # one that is out of reach, or damaged, must not hide the others
            state, cells = f"UNKNOWN ({type(error).__name__})", ("?", "", "")
        row = (shown(run.path), str(attempt.number), state, *cells)
        rows.append(tuple(map(plain, row)))  # type: ignore[arg-type]
    show(rows)
    for why in unasked:
        print(f"note: {plain(why)}", file=sys.stderr)
    return 0


def show(rows: Sequence[Sequence[str]]) -> None:
    if not sys.stdout.isatty():  # for `cut`, `awk` and a spreadsheet
        for row in rows[1:]:
            print(*row, sep="\t")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    Console(markup=False, emoji=False).print(table)  # brackets are text here


def facts_of(attempt: Attempt) -> tuple[str, str]:
    """When an attempt started, and its metrics."""
    facts = attempt.status()
    if not facts:
        return "", MISSING
    when = number(facts.get("started"))
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(when)) if when else ""
    metrics = sorted((facts.get("metrics") or {}).items())
    # A loss that is no number any more is what a list must show.
    told = [f"{k} {v:.4g}" for k, v in metrics if number(v) is not None or is_no_number(v)]
    told = [text for text in told if text.startswith(("val", "train"))]
    return started, "  ".join(told)
