"""`python -m distdl run [overrides] -- COMMAND ...`: a program of your own through a launcher.

Everything after `--` goes to the program as it is. A leading `-m package.module` or `script.py` is
run by this Python. Without `--`, the command is that of a file: +experiment=NAME with a section
`program` (docs/programs.md).
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence

from distdl.cli import main as command_line
from distdl.config import programs
from distdl.util.answers import Answer
from distdl.util.errors import UserError
from distdl.util.screen import say


def main(argv: Sequence[str]) -> Answer | int:
    """Starts the program, and returns the exit code of its run."""
    words, command = programs.split(argv)
    if {"-h", "--help"} & {*words}:
        say(f"{__doc__}\nusage: {programs.USAGE}")
        return 0
    if not command:
        _refuse_loose(words)
    return command_line.run(words, command, program=True)


def _refuse_loose(words: Sequence[str]) -> None:
    """Refuses a command without `--` before it: a word that is neither an override nor an option,
    nor the value of one."""
    first = [*itertools.takewhile(lambda word: not word.startswith("-"), words)]
    loose = next(filter(_is_loose, first), None)
    if loose is None:
        loose = next(filter(_is_loose, command_line.parse([*words]).overrides), None)
    if loose is not None:
        raise UserError.at(
            "run",
            what=f"{loose!r} is no override, and there is no -- before a command",
            remedy=f"did you mean: {_with_dashes(words, loose)}",
            code="wrong-kind",
        )


def _is_loose(word: str) -> bool:
    return "=" not in word and not word.startswith("~")


def _with_dashes(words: Sequence[str], first: str) -> str:
    """The command line with `--` before its first word that is no override."""
    at = words.index(first)
    return shlex.join(["python", "-m", "distdl", "run", *words[:at], "--", *words[at:]])
