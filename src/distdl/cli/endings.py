"""How a command ends that does not come to its end: refused, interrupted, or asked to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distdl.ranks.stopping import Ended
from distdl.util.errors import Problem, UserError
from distdl.util.exit_codes import EXIT_CANCELLED
from distdl.util.screen import escaped


@dataclass(frozen=True)
class CommandEnd:
    """The exit code, what people are told, and the same for programs."""

    exit_code: int
    text: str
    outcome: str
    problems: Sequence[Problem] = ()


def ending_of(error: UserError | KeyboardInterrupt) -> CommandEnd:
    if isinstance(error, UserError):
        return CommandEnd(error.exit_code, escaped(error.shown()), error.outcome, error.problems)
    if isinstance(error, Ended):
        text = f"{error.state.lower()} by {error}"
        return CommandEnd(error.state.exit_code, text, text)
    # A command may add how its work continues.
    text = ": ".join(("interrupted", *map(str, error.args)))
    return CommandEnd(EXIT_CANCELLED, text, text)
