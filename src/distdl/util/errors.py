"""Errors in the user's input: where it is wrong, what is wrong, and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    path: str  # in the config, as the user writes it (`strategy.stages`); empty if there is none
    what: str  # one sentence without the path
    remedy: str = ""  # what to write instead, as the user would type it; empty if it is unknown

    def __str__(self) -> str:
        text = f"{self.path}: {self.what}" if self.path else self.what
        return f"{text}\n    {self.remedy}" if self.remedy else text


class UserError(Exception):
    """The input is refused. The command line prints it without a traceback and exits with 2."""

    exit_code = 2
    outcome = "nothing was started"
    further = ""

    def __init__(self, *problems: Problem | str) -> None:
        name, text = type(self).__name__, problems[0] if problems else ""
        # If a loader's worker fails, torch raises its error again in the rank, with a text that
        # ends with the worker's traceback (`torch._utils.ExceptionWrapper`).
        if isinstance(text, str) and text.startswith(f"Caught {name} in "):
            self.add_note(text)
            message = text.rpartition(f"\n{type(self).__module__}.{name}: ")[2]
            problems = (message.rstrip("\n"),)
        self.problems: Sequence[Problem] = [
            p if isinstance(p, Problem) else Problem("", p) for p in problems
        ]
        super().__init__("\n".join(map(str, self.problems)))

    @classmethod
    def at(cls, path: str, what: str, remedy: str = "") -> Self:
        """An error with one problem."""
        return cls(Problem(path, what, remedy))


class Unchecked(UserError):
    """Problems of the config alone, found within a second; the classes may have further ones."""

    further = "classes and their arguments were not checked yet"


class Unfinished(UserError):
    """A command failed after it had begun. The same command resumes where it stopped."""

    outcome = "what was done is kept"
