"""`python -m distdl schema`: JSON Schemas, of config files for an editor, and of what a command
answers with `--json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from distdl.cli.arguments import Parser, not_empty
from distdl.cli.schemas import ANSWERS, of_command, of_events
from distdl.config.recipe import LAYERS
from distdl.config.schema import COLLECTIONS, COMPONENTS
from distdl.util import table
from distdl.util.answers import Answer
from distdl.util.errors import UserError
from distdl.util.screen import escaped, say
from distdl.util.suggest import closest

EVENTS = "events"
GROUPS = sorted({*COMPONENTS, *COLLECTIONS, "trainer"})
SPACES = "spaces"
# Of config files: a whole one, an experiment, an option of each group, and what a search varies.
CONFIGS = ("config", "experiment", *GROUPS, SPACES)
NAMES = (*CONFIGS, *LAYERS, *ANSWERS, EVENTS)


@dataclass(frozen=True)
class Schema:
    """A JSON Schema."""

    SCHEMA: ClassVar[str] = "schema/1"

    of: str
    """The command; `events`: the lines before the last one; or a kind of config files."""
    document: Mapping[str, Any]
    """Of answers in the dialect of 2020-12, of config files in that of draft 7."""


@dataclass(frozen=True)
class WrittenSchemas:
    """The schemas of config files, written for an editor."""

    SCHEMA: ClassVar[str] = "schemas/1"

    schemas: Mapping[str, str]
    """The files, by the kind of config files."""
    settings: str
    """The file that maps them to config files."""
    mapping: Mapping[str, list[str]]
    """Its entries: a schema, and patterns of files."""
    unread: Mapping[str, str]
    """Classes, whose arguments are therefore not checked, and files of options; and why."""


def main(argv: Sequence[str]) -> Answer:
    parser = Parser("python -m distdl schema", description=__doc__)
    listed = f"of config files: {', '.join(CONFIGS)}; of answers: {', '.join((*ANSWERS, EVENTS))}"
    parser.add_argument("command", nargs="*", metavar="NAME", help=listed)
    text = "write those of config files into FOLDER, .vscode for VS Code, and its settings.json"
    parser.add_argument("--write", metavar="FOLDER", type=not_empty, help=text)
    options = parser.parse_args(argv)
    name = " ".join(options.command)
    if bool(name) == bool(options.write):
        raise UserError.at(
            "schema",
            what="one of the two is needed: a name, or --write",
            remedy="python -m distdl schema --write .vscode",
            code="missing-key" if not name else "conflict",
        )
    if options.write:
        return _write(Path(options.write))
    if name not in NAMES:
        near = closest(name, NAMES)
        raise UserError.at(
            name,
            what="there is no schema of it",
            remedy=f"did you mean: python -m distdl schema {near}" if near else listed,
            code="wrong-choice",
        )
    document = _document(name)
    print(json.dumps(document, indent=1))
    return Answer(Schema(name, document))


def _document(name: str) -> Mapping[str, Any]:
    if name == EVENTS:
        return of_events()
    if name in ANSWERS:
        return of_command(name)
    from distdl.tools.editor import schemas

    found = schemas.read()
    _print_unread(found.unread)
    return found.document("experiment" if name in LAYERS else name)


def _write(folder: Path) -> Answer:
    from distdl.tools.editor import schemas, vscode

    found = schemas.read()
    written = vscode.write(found, folder)
    _print_unread(found.unread)
    rows = [(path, "  ".join(patterns)) for path, patterns in written.mapping.items()]
    table.show(("schema", "of the files"), rows)
    again = "repeat the command after new options or arguments"
    say(escaped(f"{written.settings} maps them; {again}"))
    files = {name: str(path) for name, path in written.schemas.items()}
    mapping = {path: [*patterns] for path, patterns in written.mapping.items()}
    return Answer(WrittenSchemas(files, str(written.settings), mapping, dict(found.unread)))


def _print_unread(unread: Mapping[str, str]) -> None:
    for what, why in unread.items():
        say(escaped(f"note: {what} is not checked: {why}"), to=sys.stderr)
