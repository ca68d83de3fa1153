"""Who said a value: the user, or a file that may come from somebody else.

A config is put together from many files: a run's folder, `--config-dir`, a file from a mail. What
such a file says is used, but it is not the user's own word: it cannot consent in the user's name,
and it does not decide where the user's credentials go. The user's own words are

- the command line,
- `./conf` of the folder in which the command is typed,
- `~/.config/distdl/trust.yaml` (`distdl.config.trust`).

A value is compared as it is written, before interpolations are resolved: `${model.name}` on the
command line is what some file says. Only `${oc.env:NAME}` stays the user's own.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distdl.config import trust, user_conf
from distdl.config.programs import MISSING_WORD, words_of
from distdl.config.recipe import values_at
from distdl.util.errors import UserError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# Interpolations that no config file decides: a parameter of a program is said by itself.
_OWN_INTERPOLATION = re.compile(
    r"\$\{((oc\.env:|hydra:runtime\.cwd|now:)[^${}]*|program\.params\.\w+)\}"
)
_NOT_INTERPOLATED = re.compile(r"(?<!\\)(\\\\)*\\\$\{")  # `\${`, which stays as it is


class Speaker(enum.Enum):
    """Where a value was said."""

    COMMAND_LINE = "the command line"
    CONF = "./conf"
    TRUST = "trust.yaml"
    ELSEWHERE = "a file that may come from somebody else"


_LESS_TRUSTED = [Speaker.COMMAND_LINE, Speaker.TRUST, Speaker.CONF, Speaker.ELSEWHERE].index


@dataclass(frozen=True)
class OwnWords:
    """What the user says in this process. `typed` are the overrides of the command line."""

    typed: Sequence[Override] = ()

    def speaker(self, path: str, value: object) -> Speaker:
        """Who gave this value, as it is written, to a key such as `launcher.mpirun`. An element of
        a list (`project.allow`) was said by whoever gave the key a list that holds it. A mapping
        that was put together key by key was said by the least trusted of those who gave them.

        Raises:
            UserError: trust.yaml cannot be read.
        """
        if _is_interpolated(value):
            return Speaker.ELSEWHERE
        places = (
            (Speaker.COMMAND_LINE, self._command_line),
            (Speaker.CONF, user_conf.contents()),
            (Speaker.TRUST, trust.read()),
        )
        for speaker, said in places:
            every = [given for each in said for given in values_at(each, path)]
            if any(_gives(given, value) or _is_split(given, value) for given in every):
                return speaker
        if isinstance(value, dict) and value:
            return max((self._of_part(path, *item) for item in value.items()), key=_LESS_TRUSTED)
        return Speaker.ELSEWHERE

    def _of_part(self, path: str, key: object, value: object) -> Speaker:
        """Who gave a key of a mapping its value. The path to a key with a dot leads elsewhere."""
        name = str(key)
        return Speaker.ELSEWHERE if "." in name else self.speaker(f"{path}.{name}", value)

    @cached_property
    def _command_line(self) -> list[dict[str, Any]]:
        overrides = [o for o in self.typed if not o.is_delete()]
        return [{o.key_or_group: o.value()} for o in overrides if not o.is_sweep_override()]


def _is_interpolated(value: object) -> bool:
    """Whether a config decides a value, or a part of it."""
    if isinstance(value, dict):
        return any(_is_interpolated(item) for pair in value.items() for item in pair)
    if isinstance(value, list):
        return any(map(_is_interpolated, value))
    if not isinstance(value, str) or value == MISSING_WORD:
        return False
    return "${" in _OWN_INTERPOLATION.sub("", _NOT_INTERPOLATED.sub("", value))


def _gives(given: object, value: object) -> bool:
    same = type(given) is type(value) and given == value
    return same or (isinstance(given, list) and any(_gives(each, value) for each in given))


def _is_split(given: object, value: object) -> bool:
    """Whether a value is the words of a command that was given as a text."""
    if not (isinstance(given, str) and isinstance(value, list)):
        return False
    with suppress(UserError):
        return words_of(given) == value
    return False
