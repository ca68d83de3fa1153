"""`python -m distdl schema COMMAND`: the JSON Schema of what a command answers with `--json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from distdl.cli.arguments import Parser
from distdl.cli.schemas import ANSWERS, of_command, of_events
from distdl.util.answers import Answer
from distdl.util.errors import UserError
from distdl.util.suggest import closest

EVENTS = "events"


@dataclass(frozen=True)
class Schema:
    """A JSON Schema."""

    SCHEMA: ClassVar[str] = "schema/1"

    of: str
    """The command, or `events`: the lines before the last one."""
    document: Mapping[str, Any]
    """In the dialect of 2020-12."""


def main(argv: Sequence[str]) -> Answer:
    parser = Parser("python -m distdl schema", description=__doc__)
    listed = ", ".join((*ANSWERS, EVENTS))
    parser.add_argument("command", nargs="+", metavar="COMMAND", help=f"one of: {listed}")
    options = parser.parse_args(argv)
    command = " ".join(options.command)
    if command != EVENTS and command not in ANSWERS:
        near = closest(command, [*ANSWERS, EVENTS])
        remedy = f"did you mean: python -m distdl schema {near}" if near else f"one of: {listed}"
        raise UserError.at(command, "is not a command that answers", remedy, code="wrong-choice")
    document = of_events() if command == EVENTS else of_command(command)
    print(json.dumps(document, indent=1))
    return Answer(Schema(command, document))
