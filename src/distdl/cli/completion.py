"""`python -m distdl completion SHELL`: the code by which a shell completes `distdl` at the TAB key.

eval "$(distdl completion bash)"                                 in ~/.bashrc
eval "$(distdl completion zsh)"                                  in ~/.zshrc, after compinit
distdl completion fish > ~/.config/fish/completions/distdl.fish
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from distdl.cli import completion_index
from distdl.cli.arguments import Parser
from distdl.util.answers import Answer

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class ShellCode:
    """What a shell is to run at its start."""

    SCHEMA: ClassVar[str] = "completion/1"

    shell: str
    """Its name."""
    code: str
    """Its text."""


def main(argv: Sequence[str]) -> Answer:
    parser = Parser(
        "python -m distdl completion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    options = parser.parse_args(argv)
    from argcomplete import shellcode

    completion_index.make()  # so that the first TAB is as fast as every other
    code = shellcode(["distdl"], shell=options.shell)
    print(code)
    return Answer(ShellCode(options.shell, code))
