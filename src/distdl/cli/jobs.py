"""`python -m distdl jobs ...`: shows and ends runs, wherever they are, from any later shell."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from distdl.cli.arguments import Parser
from distdl.job import JobBase, JobState
from distdl.launch import asking, job_status, jobs, one_attempt
from distdl.launch.jobs import Target
from distdl.runs.directory import Attempt, RunDirectory, shown
from distdl.util import table
from distdl.util.answering import refuse_silent
from distdl.util.errors import Damaged, UserError
from distdl.util.tail import plain, tail

VERBS = {
    "list": "list the runs of a folder and their states",
    "status": "print the state of a run",
    "logs": "print the log of a run; with --follow, until the run ends",
    "wait": "wait until a run has ended",
    "cancel": "end a run, with time for a checkpoint",
    "ended": "say that a run has ended, if its platform cannot, so that it can be resumed",
    "resubmit": "resume a run on the same platform",
    "fetch": "copy what a job on Azure, AWS or Kubernetes has written so far",
}


def main(argv: Sequence[str]) -> int:
    """One verb on one run, one job (by its handle) or all runs of a folder.

    Returns 1 if the platform cannot say; wait and logs --follow return the run's own exit code.
    """
    options = parse(argv)
    if options.verb == "list":
        return list_runs(Path(options.target or "outputs"))
    if options.verb == "resubmit":
        from distdl.cli import resume

        return resume.start(RunDirectory.open(options.target), options.overrides)
    targets = jobs.targets(options.target, options.attempt, allowed(options.overrides))
    if options.verb == "logs" and len(targets) > 1:
        raise UserError.at(
            options.target, f"has {len(targets)} runs", "name one of them", code="ambiguous"
        )
    if options.verb in ("status", "cancel"):
        return {"status": status, "cancel": cancel}[options.verb](targets)
    verbs: dict[str, Callable[[JobBase, Attempt | None], int]] = {
        "fetch": functools.partial(fetch, to=getattr(options, "to", None)),
        "wait": wait,
        "ended": ended,
        "logs": functools.partial(show_logs, follow=getattr(options, "follow", False)),
    }
    return for_each(targets, verbs[options.verb])


def for_each(targets: Sequence[Target], act: Callable[[JobBase, Attempt | None], int]) -> int:
    """Acts on every target, also after one that failed, and returns the largest exit code. Then
    raises the problems of all."""
    codes = [0]
    errors = list[UserError]()
    for target in targets:
        try:
            codes.append(act(*target))
        except UserError as error:
            errors.append(error)
    raise_all(errors)
    return max(codes)


def raise_all(errors: Sequence[UserError]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise UserError(*(problem for error in errors for problem in error.problems))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("python -m distdl jobs", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text)
        if name == "list":
            verb.add_argument("target", nargs="?", metavar="FOLDER", help="default: outputs")
            continue
        verb.add_argument("target", metavar="RUN", help="a run's folder, or slurm://123")
        verb.set_defaults(attempt=None)
        if name == "resubmit":
            verb.add_argument(
                "overrides", nargs="*", default=[], help="as for `resume`: trainer.max_epochs=20"
            )
        else:
            trusted = "project.allow=[PACKAGE]: the package of a launcher that you trust"
            verb.add_argument("overrides", nargs="*", default=[], help=trusted)
            verb.add_argument("--attempt", type=int, metavar="N", help="default: the newest")
        if name == "logs":
            verb.add_argument("--follow", "-f", action="store_true")
        if name == "fetch":
            verb.add_argument("--to", type=Path, help="default: the run's own folder")
    return parser.parse_args(argv)


def allowed(overrides: Sequence[str]) -> list[str]:
    """The names in `project.allow=[...]` on the command line; other settings are refused."""
    from distdl.config import grammar

    names: list[str] = []
    for override in grammar.parse_overrides(overrides):
        value = override.value()
        if override.key_or_group != "project.allow" or not isinstance(value, list):
            remedy = "project.allow=[PACKAGE]; `resume` and `jobs resubmit` change settings"
            raise UserError.at(
                str(override.input_line), "has no effect here", remedy, code="conflict"
            )
        names += map(str, value)
    return names


def status(targets: Sequence[Target]) -> int:
    states = set[JobState]()
    errors = list[UserError]()
    for job, attempt, report in jobs.answered(targets):
        states.add(report.state)
        print(*job_status.lines(job, attempt, report.state, report.why), sep="\n", flush=True)
        try:
            if attempt is not None:
                RunDirectory(attempt.path.parents[1]).check_config()
        except Damaged as damaged:  # the state is known, and printed nevertheless
            errors.append(damaged)
    raise_all(errors)
    return int(JobState.UNKNOWN in states)


def cancel(targets: Sequence[Target]) -> int:
    errors: list[UserError] = []
    for job, _, report in jobs.answered(targets):
        if report.state.ended:
            print(f"{job.handle}: {report.state.lower()} already", flush=True)
            continue
        try:
            if not report.reached:
                raise UserError.at(
                    job.handle, f"was not asked to end: {report.why}", code="unreachable"
                )
            job.cancel()
        except UserError as error:  # the others are asked nevertheless
            errors.append(error)
            continue
        print(f"{job.handle}: asked to end; its checkpoint is being written", flush=True)
    raise_all(errors)
    return 0


def show_logs(job: JobBase, attempt: Attempt | None, follow: bool) -> int:
    if follow and attempt is not None and not isinstance(job, jobs.Unqueried):
        from distdl.launch.following import follow as follow_job

        state = follow_job(job, attempt)
        return 0 if state is None else state.exit_code
    report = None if follow else asking.ask(job)
    try:
        if report and not report.reached and report.error is None:
            raise UserError.at(job.handle, report.why, code="unreachable")
        for line in job.logs(follow=follow):
            print(plain(line), flush=True)
    except UserError:
        # A scheduler forgets a job after minutes; a run's folder on this machine keeps the log.
        log = attempt.logs / "rank_0.log" if attempt else None
        if log is None or not log.exists():
            raise
        why = report.why if report else job.why
        print(f"{plain(why) or f'{job.handle} is gone'}; {shown(log)}:")
        for line in tail(log, lambda: False):
            print(plain(line), flush=True)
    return job.state().exit_code if follow else 0


def wait(job: JobBase, attempt: Attempt | None) -> int:
    job.wait()
    state = jobs.state(attempt, job) if attempt else job.state()
    print(f"{state}  {job.handle}", flush=True)
    return state.exit_code


def ended(job: JobBase, attempt: Attempt | None) -> int:
    if attempt is None:
        raise UserError.at(
            job.handle,
            "no run is named, in which it could be recorded",
            "its folder",
            code="missing-key",
        )
    state = one_attempt.declare_ended(attempt, job)
    path = shown(attempt.path.parents[1])
    print(f"{path}: attempt {attempt.number} is recorded as ended ({state.lower()})", flush=True)
    return 0


def fetch(job: JobBase, attempt: Attempt | None, to: Path | None) -> int:
    if not job.is_remote:
        print(f"{job.handle}: its files are here already")
        return 0
    target = to or (attempt.path.parents[1] if attempt else Path.cwd())
    job.fetch(target)
    print(f"{job.handle}: fetched into {shown(target)}")
    return 0


def list_runs(folder: Path) -> int:
    refuse_silent(folder)
    notes: dict[str, None] = {}
    for rows in job_status.tables(folder, notes):
        if rows:
            print_rows(rows)
    for note in notes:
        print(f"note: {plain(note)}", file=sys.stderr)
    return 0


def print_rows(rows: Sequence[job_status.Row]) -> None:
    if not sys.stdout.isatty():  # for `cut`, `awk` and spreadsheets
        print(*("\t".join(row) + "\n" for row in rows), sep="", end="", flush=True)
        return
    table.show(job_status.COLUMNS, rows)
