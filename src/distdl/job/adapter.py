"""Launchers and jobs of somebody's own that do not derive from the base classes: they get the
defaults here, so that everything else may rely on each member."""

from __future__ import annotations

import functools
import inspect
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

from distdl.job.base import Job, JobBase, LauncherBase
from distdl.util.errors import UserError

REQUIRED = ("request", "submit", "attach")


def is_launcher(thing: object) -> TypeGuard[type]:
    """Whether an object is a class with the methods that every launcher must have."""
    if not inspect.isclass(thing):
        return False
    found = [(getattr(thing, name, None), getattr(LauncherBase, name)) for name in REQUIRED]
    return all(callable(own) and own is not default for own, default in found)


@functools.cache
def adapted_launcher(kind: type) -> type[LauncherBase[Any]]:
    """The class of a launcher; if it does not derive from LauncherBase, a class of the same name
    that has its members, and the defaults for all others."""
    if issubclass(kind, LauncherBase):
        return kind
    named = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    bases = (kind, LauncherBase)
    return types.new_class(kind.__name__, bases, exec_body=lambda body: body.update(named))


def adapted_job(job: Job) -> JobBase:
    """The job; if its class does not derive from JobBase, with the defaults for what it lacks."""
    return job if isinstance(job, JobBase) else AdaptedJob(job)


class AdaptedJob(JobBase):
    """A job of another class: `own` has its members, and JobBase the others."""

    def __init__(self, own: Job) -> None:
        self.own = own

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401 - as object's own
        if name in OF_A_JOB:
            own = object.__getattribute__(self, "own")
            if hasattr(own, name):
                return getattr(own, name)
        return object.__getattribute__(self, name)

    @property
    def platform(self) -> str:
        return type(self.own).__name__

    @property
    def is_remote(self) -> bool:
        return hasattr(self.own, "fetch")

    @classmethod
    def ask_each(cls, jobs: Sequence[AdaptedJob]) -> Iterable[AdaptedJob]:
        kind = type(jobs[0].own)
        if hasattr(kind, "ask_each"):
            adapted = {id(job.own): job for job in jobs}
            yield from (adapted[id(own)] for own in kind.ask_each([job.own for job in jobs]))
            return
        if hasattr(kind, "ask"):
            kind.ask([job.own for job in jobs])
        yield from jobs


# What a job may have itself. Several jobs are asked at once by their class.
OF_A_JOB = {name for name in vars(JobBase) if not name.startswith("_")}
OF_A_JOB -= {"ask", "ask_each", "is_remote"}


@contextmanager
def blamed(launcher: type, member: str) -> Iterator[None]:
    """Refuses a launcher of somebody's own whose member, called inside, raises: by its name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # somebody's own code
        if launcher.__module__.startswith("distdl.launchers."):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        _, *own = [each for each in frames if each.filename != __file__]  # behind the call itself
        remedy = f"docs/own_launcher.md shows how {member} is written"
        if own:
            remedy = f"see {own[-1].filename}, line {own[-1].lineno}"
        raise UserError.at(
            "launcher",
            what=f"{launcher.__qualname__}.{member} failed: {type(error).__name__}: {error}",
            remedy=remedy,
            code="failed",
        ) from error
