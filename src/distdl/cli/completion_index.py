"""Makes the index of the TAB key (`cli/config_files.py`): verbs and their options, from the parsers
themselves, and keys with a few values, from the typed sections. Run as a process of its own."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel

from distdl.cli import config_files
from distdl.cli import main as command_line
from distdl.cli.arguments import Parser
from distdl.config import groups, schema
from distdl.tools.prepare.source import KINDS
from distdl.util.errors import UserError

# "RUN", "a run directory"; overrides are "as for a run".
_A_RUN = re.compile(r"\bRUN\b|\ba run( directory|'s folder)\b")


class _Seen(Exception):
    """A verb has made its parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def make() -> None:
    """Writes the index anew."""
    known = config_files.empty()
    known["verbs"] = verbs()
    known["keys"] = [key for key in schema.known_paths() if key not in _sections()]
    known["values"] = dict(_values(schema.Config, ""))
    known["defaults"] = groups.defaults()
    config_files.refresh(known)
    config_files.write(known)


def verbs() -> dict[str, Any]:
    """Each verb with its options and words, as the index has them; "" is a command without one."""
    found = {verb: _of(_parser_of(verb)) for verb in ("", *command_line.COMMANDS)}
    found["prepare"]["verbs"] = {kind: _of(_parser_of("prepare", kind)) for kind in KINDS}
    found["schema"]["words"][0]["phrases"] += _schemas()
    found["explain"]["words"][0]["choices"] += _codes()
    return found


def _sections() -> tuple[str, ...]:
    """Keys that are sections, of which only the keys inside are written."""
    return (*schema.COMPONENTS, *schema.COLLECTIONS, "trainer", "project", "checkpoint", "watchdog")


def _schemas() -> list[str]:
    from distdl.cli.schema import NAMES

    return [*NAMES]


def _codes() -> list[str]:
    from distdl.util.refusal_codes import CODES

    return [*CODES]


def _parser_of(verb: str, *words: str) -> argparse.ArgumentParser:
    """The parser of a verb, or of a command without one, as the verb makes it. `words` are those
    that it needs for that."""
    with _stopped_at_the_parser():
        try:
            if verb:
                importlib.import_module(command_line.COMMANDS[verb][0]).main([*words])
            else:
                command_line.parse([])
        except _Seen as seen:
            return seen.parser
        except UserError:
            pass
    return argparse.ArgumentParser()


@contextmanager
def _stopped_at_the_parser() -> Iterator[None]:
    names = [name for name in vars(argparse.ArgumentParser) if name.startswith("parse_")]
    kept = {name: getattr(argparse.ArgumentParser, name) for name in names}

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        raise _Seen(parser)

    try:
        for name in names:
            setattr(argparse.ArgumentParser, name, stop)
        yield
    finally:
        for name, method in kept.items():
            setattr(argparse.ArgumentParser, name, method)


def _of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """What the index has of a parser."""
    options: dict[str, Any] = {}
    words = list[dict[str, Any]]()
    verbs: dict[str, Any] = {}
    for action in parser._actions:
        choices = [str(choice) for choice in action.choices or ()]
        if isinstance(action, argparse._SubParsersAction):
            verbs = {name: _of(inner) for name, inner in action.choices.items()}
        elif action.option_strings:
            value = action.nargs != 0
            about = {"value": value, "choices": choices}
            options |= dict.fromkeys(action.option_strings, about)
        else:
            words.append(_word(action, choices, parser))
    return {"options": options, "words": words, "verbs": verbs}


def _word(
    action: argparse.Action, choices: list[str], parser: argparse.ArgumentParser
) -> dict[str, Any]:
    settings = [*parser.settings] if isinstance(parser, Parser) else []
    return {
        "choices": choices,
        "phrases": [],  # of several words: `jobs list`
        "more": action.nargs in ("*", "+"),
        "overrides": action.dest == "overrides" or "override" in str(action.help),
        "settings": settings if action.dest == "settings" else [],
        "runs": bool(_A_RUN.search(f"{action.metavar} {action.help}")),
    }


def _values(model: type[BaseModel], above: str) -> Iterator[tuple[str, list[str]]]:
    """The values of keys that have only some."""
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _values(kind, f"{above}{name}.")
        if values := [*_words_of(field.annotation)]:
            yield f"{above}{name}", values
    if above == "trainer.":
        yield "trainer.precision", [*schema.PRECISIONS]


def _words_of(kind: object) -> Iterator[str]:
    if kind is bool:
        yield from ("true", "false")
    elif get_origin(kind) is Literal:
        yield from (str(each) for each in get_args(kind))
    elif get_origin(kind) is not None:
        for member in get_args(kind):
            yield from _words_of(member)


if __name__ == "__main__":
    make()
