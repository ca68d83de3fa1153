"""Follows a submitted job on this terminal: prints its log; Ctrl-C detaches or cancels."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from distdl.job import JobBase, JobState
from distdl.launch import jobs
from distdl.ranks import stopping
from distdl.runs.directory import Attempt, shown
from distdl.util.answers import emit
from distdl.util.errors import UserError
from distdl.util.screen import say
from distdl.util.tail import plain


def follow(job: JobBase, attempt: Attempt) -> JobState | None:
    """Prints the log until the job has ended. Returns its final state, None if it was left running,
    or UNKNOWN if its platform cannot be reached."""
    with ends_with_this_shell(job):
        while True:
            try:
                for line in job.logs(follow=True):
                    show_line(line)
                job.wait()
                return jobs.state(attempt, job)
            except UserError as error:  # the platform cannot be reached; the job continues
                say(f"distdl: {error}", to=sys.stderr)
                print_left(job, attempt)
                return JobState.UNKNOWN
            except KeyboardInterrupt:
                if not asks_to_cancel(job):
                    print_left(job, attempt)
                    return None
                say(f"cancelling {job.handle} ...")
                job.cancel()


def show_line(line: str) -> None:
    """Prints a line of a log."""
    text = plain(line)
    say(text)
    emit("line", text=text)


def asks_to_cancel(job: JobBase) -> bool:
    """Asks the user whether to cancel. Without a terminal the job is left running."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    question = f"\n{job.handle}: [d]etach and leave it running, or [c]ancel it? "
    try:
        return input(question).strip().lower().startswith("c")
    except (KeyboardInterrupt, EOFError):
        return False


def print_left(job: JobBase, attempt: Attempt) -> None:
    run = shown(attempt.path.parents[1])
    say(f"left running: {job.handle}")
    say(f"watch   python -m distdl jobs logs --follow {run}")
    say(f"cancel  python -m distdl jobs cancel {run}")


@contextmanager
def ends_with_this_shell(job: JobBase) -> Iterator[None]:
    """Passes a signal by which a platform ends this command on to a job on this machine (mpirun):
    a container's first process gets it alone. A job in a queue continues."""
    if not job.ends_with_shell:
        yield
        return
    # The job is only asked to end: its log is followed until its last checkpoint.
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    previous = stopping.set_handlers(dict.fromkeys(numbers, lambda *_: job.preempt()))
    try:
        yield
    finally:
        stopping.set_handlers(previous)
