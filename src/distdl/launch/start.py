"""Starts a plan: submits it, waits for its job, and says what to type next."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from distdl.config import recipe as configs
from distdl.incident import incident
from distdl.job import JobBase, JobState
from distdl.launch import following, left_out, progress_events, submitting, would_fit
from distdl.launch.answers import RunState, ended
from distdl.launch.planning import Plan, never_trained, with_choices
from distdl.launch.retrying import Retries
from distdl.runs.directory import Attempt, shown
from distdl.runs.failures import describe, problems
from distdl.util.answers import Answer
from distdl.util.exit_codes import EXIT_REFUSED
from distdl.util.redact import redact_command
from distdl.util.screen import escaped, say


def answer(planned: Plan, command: Sequence[str]) -> Answer:
    """Starts a run, as `start` does, and returns what became of it."""
    with progress_events.told(planned.run):
        code = start(planned, command)
    last = planned.run.last_attempt()
    failure = last.first_error() if last is not None and code == EXIT_REFUSED else None

    def state() -> RunState:
        found = ended(planned.run)
        bare = f"python -m distdl resume {shlex.quote(shown(planned.run.path))}"
        return replace(found, next=planned.resume_command()) if found.next == bare else found

    return Answer(state, code, problems(failure) if failure else ())


def start(planned: Plan, command: Sequence[str]) -> int:
    """Writes the run, starts it, waits for it, and returns the exit code."""
    if planned.finished:
        say(how_to_train_longer(planned))
        return 0
    submitting.move_failed_run(planned)
    retries = Retries(planned.run, int(planned.config.launcher.get("max_attempts") or 0))
    slow = set[str]()
    retry = False
    attempt = None
    while True:
        if attempt is not None:
            planned = with_choices(planned, attempt)
        fitted = left_out.fit(planned, slow, retry=retry)
        with submitting.interruption_recorded(fitted):
            attempt, job = submitting.submit(fitted, command)
            with left_out.watched(planned, fitted, slow, job) as back:
                state = wait_or_follow(job, attempt, fitted)
        if state is None or state is JobState.UNKNOWN:  # left running, or platform unreachable
            return 0 if state is None else state.exit_code
        if retry := back.is_set() and state in (JobState.CANCELLED, JobState.PREEMPTED):
            continue
        report_failure(attempt)
        code = int(attempt.status().get("exit_code", state.exit_code))
        retry = state in (JobState.FAILED, JobState.PREEMPTED) and code != EXIT_REFUSED
        # A command that is asked to end starts nothing more.
        if state is JobState.PREEMPTED and job.preempted_here:
            break
        try:
            if not retry or not retries.again(attempt, state):
                break
        except KeyboardInterrupt:  # in the pause
            print_next_command(planned, attempt, state, command)
            raise
    if state is not JobState.SUCCEEDED and code != EXIT_REFUSED:  # a refusal has its own remedy
        print_next_command(planned, attempt, state, command)
    if state is JobState.FAILED:
        would_fit.say(attempt)
    return code


def print_next_command(
    planned: Plan, attempt: Attempt, state: JobState, command: Sequence[str]
) -> None:
    """Prints what to type after a run that did not succeed."""
    if (attempt.first_error() or {}).get("type") == "BdbQuit":  # the user quit the debugger
        return
    again = shlex.join(["python", "-m", "distdl", *redact_command(command[1:])])
    if state is JobState.FAILED and never_trained(planned.run):
        say(f"failed before its first checkpoint. Fix the error, then start again:\n  {again}")
        return
    if not configs.evaluates(planned.config):
        again = planned.resume_command()
    say(f"{state.lower()}. To resume:\n  {again}")


def wait_or_follow(job: JobBase, attempt: Attempt, planned: Plan) -> JobState | None:
    """Waits for a job or follows it. None if it continues without this process."""
    if planned.launch.foreground:
        return job.wait()
    say(f"submitted  {job.handle}")
    for note in planned.notes:
        say(escaped(f"note       {note}"))
    if job.url:
        say(f"watch      {job.url}")
    if not planned.config.follow:
        following.print_left(job, attempt)
        return None
    say()
    return following.follow(job, attempt)


def how_to_train_longer(planned: Plan) -> str:
    what = f"{shown(planned.run.path)} has finished: nothing to do"
    longer = configs.longer(planned.config)
    if not longer:
        return what
    return f"{what}. To train longer:\n  {planned.resume_command(*longer.split())}"


def report_failure(attempt: Attempt) -> None:
    """Prints which rank failed first, and why; the others usually fail because of it."""
    incident.await_monitors(attempt)
    if report := incident.write(attempt):
        say(incident.head(report, command=False), to=sys.stderr)
    elif (first := attempt.first_error()) and first["rank"] != 0:  # refused
        refused = "\n".join(problem.shown() for problem in problems(first))
        say(f"rank {first['rank']} failed first: {refused or describe(first)}", to=sys.stderr)
