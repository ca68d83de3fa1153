"""Launchers and jobs of somebody's own: one that does not derive from the base classes gets the
defaults here, so that everything else may rely on each member, and a launcher's member that raises
is a refusal that names it."""

from __future__ import annotations

import functools
import inspect
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

from distdl.job.base import Job, JobBase, LauncherBase
from distdl.util.errors import UserError

REQUIRED = ("request", "submit", "attach")
# What a launcher's class is asked before there is an object. `check` has a guard of its own
# (`distdl.validation.own_checks`).
OF_THE_CLASS = {
    name
    for name, member in vars(LauncherBase).items()
    if isinstance(member, staticmethod | classmethod) and name != "check"
}


def is_launcher(thing: object) -> TypeGuard[type]:
    """Whether an object is a class with the methods that every launcher must have."""
    if not inspect.isclass(thing):
        return False
    found = [(getattr(thing, name, None), getattr(LauncherBase, name)) for name in REQUIRED]
    return all(callable(own) and own is not default for own, default in found)


@functools.cache
def adapted_launcher(kind: type) -> type[LauncherBase[Any]]:
    """The class of a launcher. If it is not one of distdl's, a class of the same name that has its
    members, and the defaults for all others. One of its members that raises is refused by name."""
    if kind.__module__.startswith("distdl.launchers."):
        return kind
    own: Any = kind
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "request": _guarded(kind, "request", own.request),
    }
    for name in OF_THE_CLASS & {*dir(kind)}:
        member = inspect.getattr_static(kind, name)
        if member is not inspect.getattr_static(LauncherBase, name):
            members[name] = staticmethod(_guarded(kind, name, getattr(kind, name)))
    bases = (kind,) if issubclass(kind, LauncherBase) else (kind, LauncherBase)
    return types.new_class(kind.__name__, bases, exec_body=lambda body: body.update(members))


def _guarded(kind: type, name: str, member: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a member of a launcher's class, and refuses it if it raises."""
    needs_object = name in OF_THE_CLASS and inspect.isfunction(inspect.getattr_static(kind, name))

    def call(*arguments: object) -> object:
        try:
            answer = member(*arguments)
            return [*answer] if name == "notes" else answer
        except UserError:
            raise
        except Exception as error:  # somebody's own code
            frame = traceback.extract_tb(error.__traceback__)[-1]
            remedy = f"see {frame.filename}, line {frame.lineno}"
            if needs_object:
                remedy = (
                    "write @staticmethod above it: the class is asked before there is an object"
                )
            what = f"{kind.__qualname__}.{name} failed: {type(error).__name__}: {error}"
            raise UserError.at("launcher", what=what, remedy=remedy, code="failed") from error

    return call


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
