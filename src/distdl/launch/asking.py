"""Asks platforms for the states of jobs, each in a thread of its own: one that does not answer
neither delays nor hides the jobs of another."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from distdl.job import JobBase, JobState

LIMIT_S = 10.0  # seconds without any answer, after which a platform is given up
PROMPT_S = 1.0  # seconds in which most platforms answer: their answers come together, in order


@dataclass(frozen=True)
class Report:
    """What a platform says about a job.

    Args:
        state: UNKNOWN if the platform has forgotten the job, or cannot be asked.
        why: The reason of UNKNOWN, or what a PENDING job waits for.
        reached: Whether the platform answered.
        error: What the job's class raised instead of an answer.
    """

    state: JobState
    why: str = ""
    reached: bool = True
    error: Exception | None = None


Answers = SimpleQueue[tuple[int, Report]]


def ask(job: JobBase) -> Report:
    """Asks about one job."""
    return ask_all([job])[0]


def ask_all(jobs: Sequence[JobBase]) -> list[Report]:
    """A report for each job, once all platforms have answered or were given up."""
    answered = {number: report for block in blocks(jobs) for number, report in block.items()}
    return [answered[number] for number in range(len(jobs))]


def blocks(jobs: Sequence[JobBase]) -> Iterator[dict[int, Report]]:
    """Reports by the positions of their jobs: first those that come within PROMPT_S, if any, then
    others as they come, and those of a platform that is silent for LIMIT_S last."""
    waiting: dict[str, dict[int, JobBase]] = {}
    for number, job in enumerate(jobs):
        waiting.setdefault(job.platform, {})[number] = job
    answers: Answers = SimpleQueue()
    for platform, group in waiting.items():
        # A thread cannot be ended: one that still waits at the end of the command ends with it.
        name = f"asks {platform}"
        arguments = ({**group}, answers)
        threading.Thread(target=_ask, args=arguments, name=name, daemon=True).start()
    started = time.monotonic()
    heard = dict.fromkeys(waiting, started)
    block: dict[int, Report] = {}
    is_first = True
    while waiting:
        until = min(heard.values()) + LIMIT_S
        if block or is_first:
            until = min(until, started + PROMPT_S)
        try:
            number, report = answers.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            if block or is_first:
                yield block
            is_first = False
            silent = [name for name in heard if heard[name] + LIMIT_S <= time.monotonic()]
            block = {n: _silent(name) for name in silent for n in waiting.pop(name)}
            heard = {name: heard[name] for name in waiting}
            continue
        platform = jobs[number].platform
        if platform in waiting:  # else it was given up before
            block[number] = report
            heard[platform] = time.monotonic()
            del waiting[platform][number]
            if not waiting[platform]:
                del waiting[platform], heard[platform]
    if block or is_first:
        yield block


def _silent(platform: str) -> Report:
    why = f"{platform} has not answered for {LIMIT_S:.0f} s"
    return Report(JobState.UNKNOWN, why, reached=False)


def _ask(group: dict[int, JobBase], answers: Answers) -> None:
    """Puts a report for each job of one platform."""
    numbers = {id(job): number for number, job in group.items()}
    try:
        for job in _answered([*group.values()]):
            answers.put((numbers.pop(id(job)), _report(job)))
    except Exception as error:  # of the query for all of them: their rows show it
        for number in numbers.values():
            answers.put((number, _failed(error)))


def _answered(jobs: Sequence[JobBase]) -> Iterable[JobBase]:
    """The jobs, each once its platform has answered. A single one is asked by its own query."""
    return type(jobs[0]).ask_each(jobs) if len(jobs) > 1 else jobs


def _report(job: JobBase) -> Report:
    try:
        state = job.state()
    except Exception as error:  # a launcher of one's own: the job's row shows it
        return _failed(error)
    why = str(job.why) if state in (JobState.UNKNOWN, JobState.PENDING) else ""
    return Report(state, why, job.reached)


def _failed(error: Exception) -> Report:
    return Report(JobState.UNKNOWN, str(error), reached=False, error=error)
