"""`python -m distdl run [overrides] -- COMMAND ...`: a program of your own through a launcher.

Everything after `--` goes to the program as it is. A leading `-m package.module` or `script.py` is
run by this Python. Without `--`, the command is that of a file: +experiment=NAME with a section
`program` (docs/programs.md).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from distdl.cli import main as command_line
from distdl.config import programs
from distdl.util.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Starts the program, and returns the exit code of its run."""
    words, command = programs.split(argv)
    if {"-h", "--help"} & {*words}:
        print(f"{__doc__}\nusage: {programs.USAGE}")
        return 0
    loose = next((w for w in words if "=" not in w and not w.startswith(("-", "~"))), None)
    if loose is not None and not command:
        what = f"{loose!r} is no override, and there is no -- before a command"
        raise UserError.at(
            "run", what, f"did you mean: {_with_dashes(words, loose)}", code="wrong-kind"
        )
    return command_line.run(words, command, program=True)


def _with_dashes(words: Sequence[str], first: str) -> str:
    """The command line with `--` before its first word that is no override."""
    at = words.index(first)
    return shlex.join(["python", "-m", "distdl", "run", *words[:at], "--", *words[at:]])
