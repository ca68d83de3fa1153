"""Jobs whose platform is asked over a network: for one job or for many, and through an outage."""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Generic, Self, TypeVar

from distdl.job import Job, JobBase, JobState
from distdl.util.errors import Forgotten, Lasting, NoRight, NotSignedIn, UserError
from distdl.util.tail import plain

T = TypeVar("T")
A = TypeVar("A")  # a platform's answer about a job


def pace(shortest: float, longest: float = 0.0) -> Iterator[None]:
    """Yields at once, and again after each pause. Pauses grow from `shortest` to `longest` seconds;
    by default they do not grow."""
    pause = shortest
    yield
    while True:
        time.sleep(pause)
        yield
        pause = min(pause * 1.3, max(shortest, longest))


def wait_until_ended(job: Job, seconds: float) -> JobState:
    """Polls a job on this machine, every `seconds` seconds, until it has ended."""
    while not (state := job.state()).ended:
        time.sleep(seconds)
    return state


class QueriedJob(JobBase, ABC, Generic[A]):
    """Base class of jobs whose platform is queried over a network, for one job or many at once.

    A subclass defines the queries (`_query`, `_query_all`) and reads their answers (`_state_from`).
    """

    poll_seconds: float = 5.0
    patience: ClassVar[float] = math.inf
    _answer: A | UserError | None = None  # stored by `ask` for the next `state`

    @abstractmethod
    def _query(self) -> A:
        """The platform's answer about this job; raises Forgotten if it does not know the job, and
        another UserError if it cannot be queried."""

    @classmethod
    @abstractmethod
    def _query_all(cls, jobs: Sequence[Self]) -> Iterable[tuple[Self, A | UserError]]:
        """Queries several jobs at once. A job without an answer is then queried on its own. If the
        answer is an exception, the job's next `state` is UNKNOWN."""

    @abstractmethod
    def _state_from(self, answer: A) -> JobState: ...

    @classmethod
    def ask_each(cls, jobs: Sequence[Self]) -> Iterator[Self]:
        """Queries several jobs at once, and yields each once it has its answer, which its next
        `state` uses. What keeps the platform from answering is met once, not once for each job."""
        missing = {id(job): job for job in jobs}
        try:
            try:
                for job, answer in cls._query_all(jobs):
                    job._answer = answer
                    yield missing.pop(id(job))
            except NotSignedIn:
                raise
            except NoRight:  # who may not see the list may still see a job
                pass
            for key in [*missing]:
                missing[key]._answer = missing[key]._asked()
                yield missing.pop(key)
        except UserError as error:
            for job in missing.values():
                job._answer = error
                yield job

    @classmethod
    def ask(cls, jobs: Sequence[Self]) -> None:
        """Queries several jobs at once; the next `state` of each job uses that answer."""
        for _ in cls.ask_each(jobs):
            pass

    def _asked(self) -> A | UserError:
        """The answer about this job, which an error is that says nothing about other jobs."""
        try:
            return self._query()
        except UserError as error:
            if not _is_about_the_job(error):
                raise
            return error

    def state(self) -> JobState:
        answer = self._answer
        self._answer = None
        self.why = ""
        self.reached = True
        try:
            if isinstance(answer, UserError):
                raise answer
            state = self._state_from(self._query() if answer is None else answer)
        except UserError as error:
            self.why = str(error)
            self.reached = _is_about_the_job(error)
            return JobState.UNKNOWN
        if state is JobState.UNKNOWN:
            self.why = f"{self.platform} reports a state that distdl does not know"
        return state

    def wait(self) -> JobState:
        """Waits until the job has ended, also through an outage of up to `patience` seconds. Raises
        Forgotten, or NoRight if the credentials are no longer valid or have lost their right."""
        for _ in pace(self.poll_seconds):
            state = self._state_from(self._awaited())
            if state.ended:
                return state
        raise AssertionError

    def _awaited(self) -> A:
        """The platform's answer, if need be after an outage of up to `patience` seconds."""
        began = time.monotonic()
        said = False
        for _ in pace(self.poll_seconds):
            try:
                return self._query()
            except UserError as error:
                if isinstance(error, Lasting) or time.monotonic() - began > self.patience:
                    raise
                if not said:
                    print(self._outage(error), file=sys.stderr, flush=True)
                said = True
        raise AssertionError

    def _outage(self, error: UserError) -> str:
        return f"{self.platform} does not answer, trying again: {plain(error.problems[0].what)}"


def _is_about_the_job(error: UserError) -> bool:
    """Whether an error is the platform's answer about one job, and not one about all its jobs."""
    return isinstance(error, Forgotten | NoRight) and not isinstance(error, NotSignedIn)


def from_pages(
    jobs: Mapping[str, T], pages: Iterable[Iterable[tuple[str, Any]]]
) -> Iterator[tuple[T, Any]]:
    """Pairs jobs with their (name, answer) entries in a platform's list, newest first. Reads at
    most a page per job: beyond that, separate queries need fewer requests."""
    missing = dict(jobs)
    for page in islice(pages, len(jobs)):
        for name, answer in page:
            if job := missing.pop(name, None):
                yield job, answer
        if not missing:
            return
