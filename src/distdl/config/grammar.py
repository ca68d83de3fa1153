"""Overrides of the command line, parsed by Hydra's own grammar."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from distdl.config import programs
from distdl.config.hints import words
from distdl.util.errors import Problem, UserError
from distdl.util.redact import redact

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def texts_of(overrides: Iterable[Override]) -> list[str]:
    return [str(override.input_line) for override in overrides]


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parses overrides by Hydra's own grammar. Words that are not overrides are refused by a
    UserError."""
    words.check(overrides)
    return parse_checked(overrides)


def parse_checked(overrides: Sequence[str]) -> list[Override]:
    """As `parse_overrides`, for words that `words.check` has seen. Each text is parsed only once in
    a process, so the members of a sweep share what they have in common."""
    from hydra.errors import HydraException

    found: list[Override] = []
    problems: list[Problem] = []
    for text in overrides:
        try:
            found.append(parsed(text))
        except HydraException as error:
            problems.append(
                Problem(
                    text.partition("=")[0].strip(),
                    what=f"{redact(repr(text))} is not an override",
                    remedy=words.for_override(text, first_lines(error)),
                    code="wrong-kind",
                )
            )
    if problems:
        raise UserError(*problems)
    return found


@functools.cache
def parsed(text: str) -> Override:
    """An override; Hydra's own error if it is none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(quoted(programs.full(text)))


def quoted(text: str) -> str:
    """An override with quotes around its non-ASCII words, as Hydra needs them."""
    key, equals, value = text.partition("=")
    if value.isascii() or words.is_quoted(value):
        return text
    return key + equals + re.sub(r"[\w./:-]*[^\W\x00-\x7f][\w./:-]*", r'"\g<0>"', value)


def sweep_keys(overrides: Sequence[Override]) -> list[str]:
    return [o.key_or_group for o in overrides if o.is_sweep_override()]


def option_name(value: object) -> str:
    """The name of an option, as it was typed, for a value that Hydra's grammar has read."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def first_lines(error: Exception) -> str:
    """Hydra's message without its tail of search paths."""
    text = str(error).strip() or type(error).__name__
    text = text.split("\nConfig search path:")[0].split("\nSet the environment variable")[0]
    return re.split(r"\n\s*full_key:", text)[0].strip()
