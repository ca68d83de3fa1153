"""`python -m distdl jobs ...`: shows and ends runs, wherever they are, from any later shell."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from distdl.cli.arguments import Parser
from distdl.job import JobBase, JobState
from distdl.launch import answers, asking, job_status, jobs, one_attempt
from distdl.launch.following import follow as follow_job
from distdl.launch.following import show_line
from distdl.launch.jobs import Target
from distdl.runs.directory import Attempt, RunDirectory, shown
from distdl.util import table
from distdl.util.answering import refuse_silent
from distdl.util.answers import Answer
from distdl.util.errors import Damaged, UserError
from distdl.util.screen import say
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


def main(argv: Sequence[str]) -> Answer:
    """One verb on one run, one job (by its handle) or all runs of a folder.

    The exit code is 1 if the platform cannot say; that of wait and logs --follow is the run's own.
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
            options.target,
            what=f"has {len(targets)} runs",
            remedy="name one of them",
            code="ambiguous",
        )
    if options.verb in ("status", "cancel"):
        return {"status": status, "cancel": cancel}[options.verb](targets)
    if options.verb == "logs":
        return show_logs(*targets[0], follow=options.follow)
    if options.verb == "wait":
        return wait(targets)
    acts: dict[str, Callable[[JobBase, Attempt | None], str]] = {
        "fetch": functools.partial(fetch, to=getattr(options, "to", None)),
        "ended": ended,
    }
    return Answer(answers.Asked(dict(for_each(targets, acts[options.verb]))))


def for_each(
    targets: Sequence[Target], act: Callable[[JobBase, Attempt | None], str]
) -> Iterator[tuple[str, str]]:
    """Acts on every target, also after one that failed. Then raises the problems of all."""
    errors = list[UserError]()
    for job, attempt in targets:
        try:
            yield job.handle, act(job, attempt)
        except UserError as error:
            errors.append(error)
    raise_all(errors)


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
            raise UserError.at(
                str(override.input_line),
                what="has no effect here",
                remedy="project.allow=[PACKAGE]; `resume` and `jobs resubmit` change settings",
                code="conflict",
            )
        names += map(str, value)
    return names


def status(targets: Sequence[Target]) -> Answer:
    found = list[answers.RunState]()
    errors = list[UserError]()
    unknown = False
    for job, attempt, report in jobs.answered(targets):
        known = answers.state_of(job, attempt, report.state, report.why)
        unknown |= report.state is JobState.UNKNOWN
        found.append(known)
        say("\n".join(job_status.lines(known, attempt)))
        try:
            if attempt is not None:
                RunDirectory(attempt.path.parents[1]).check_config()
        except Damaged as damaged:  # the state is known, and printed nevertheless
            errors.append(damaged)
    raise_all(errors)
    return Answer(answers.RunStates(found), int(unknown))


def cancel(targets: Sequence[Target]) -> Answer:
    done = dict[str, str]()
    errors: list[UserError] = []
    for job, _, report in jobs.answered(targets):
        if report.state.ended:
            done[job.handle] = f"{report.state.lower()} already"
            say(f"{job.handle}: {done[job.handle]}")
            continue
        try:
            if not report.reached:
                raise UserError.at(
                    job.handle, what=f"was not asked to end: {report.why}", code="unreachable"
                )
            job.cancel()
        except UserError as error:  # the others are asked nevertheless
            errors.append(error)
            continue
        done[job.handle] = "asked to end"
        say(f"{job.handle}: asked to end; its checkpoint is being written")
    raise_all(errors)
    return Answer(answers.Asked(done))


def show_logs(job: JobBase, attempt: Attempt | None, follow: bool) -> Answer:
    if follow and attempt is not None and not isinstance(job, jobs.Unqueried):
        state = follow_job(job, attempt)
        code = 0 if state is None else jobs.exit_code(state, attempt)
        return Answer(answers.Log(job.handle), code)
    report = None if follow else asking.ask(job)
    try:
        if report and not report.reached and report.error is None:
            raise UserError.at(job.handle, what=report.why, code="unreachable")
        for line in job.logs(follow=follow):
            show_line(line)
    except UserError:
        # A scheduler forgets a job after minutes; a run's folder on this machine keeps the log.
        log = attempt.logs / "rank_0.log" if attempt else None
        if log is None or not log.exists():
            raise
        why = report.why if report else job.why
        say(f"{plain(why) or f'{job.handle} is gone'}; {shown(log)}:")
        for line in tail(log, lambda: False):
            show_line(line)
    return Answer(answers.Log(job.handle), job.state().exit_code if follow else 0)


def wait(targets: Sequence[Target]) -> Answer:
    """Waits for each; the exit code is the largest of the runs' own."""
    codes = [0]

    def ended_as(job: JobBase, attempt: Attempt | None) -> str:
        job.wait()
        state = jobs.state(attempt, job) if attempt else job.state()
        say(f"{state}  {job.handle}")
        codes.append(jobs.exit_code(state, attempt))
        return str(state)

    return Answer(answers.Asked(dict(for_each(targets, ended_as))), max(codes))


def ended(job: JobBase, attempt: Attempt | None) -> str:
    if attempt is None:
        raise UserError.at(
            job.handle,
            what="no run is named, in which it could be recorded",
            remedy="its folder",
            code="missing-key",
        )
    state = one_attempt.declare_ended(attempt, job)
    path = shown(attempt.path.parents[1])
    say(f"{path}: attempt {attempt.number} is recorded as ended ({state.lower()})")
    return str(state)


def fetch(job: JobBase, attempt: Attempt | None, to: Path | None) -> str:
    if not job.is_remote:
        say(f"{job.handle}: its files are here already")
        return shown(attempt.path.parents[1]) if attempt else ""
    target = to or (attempt.path.parents[1] if attempt else Path.cwd())
    job.fetch(target)
    say(f"{job.handle}: fetched into {shown(target)}")
    return shown(target)


def list_runs(folder: Path) -> Answer:
    refuse_silent(folder)
    found = list[answers.RunState]()
    notes: dict[str, None] = {}
    for runs in job_status.listed(folder, notes):
        if runs:
            print_rows([job_status.row(run) for run in runs])
        found += runs
    for note in notes:
        say(f"note: {plain(note)}", to=sys.stderr)
    return Answer(answers.RunStates(found, [*notes]))


def print_rows(rows: Sequence[job_status.Row]) -> None:
    if not sys.stdout.isatty():  # for `cut`, `awk` and spreadsheets
        print(*("\t".join(row) + "\n" for row in rows), sep="", end="", flush=True)
        return
    table.show(job_status.COLUMNS, rows)
