"""Whether the user has agreed to what a config executes (`distdl.config.doors`)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from distdl.config import agreed, credentials, doors, programs, trust
from distdl.config.own_words import OwnWords, Speaker
from distdl.util.errors import Problem, UserError
from distdl.util.redact import redact

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def refuse(config: DictConfig, typed: Sequence[Override]) -> None:
    """Refuses, before any of it is used, what only a file that may come from somebody else says.

    Args:
        config: As composed, with its interpolations.
        typed: The overrides of the command line.

    Raises:
        UserError: with all such keys, and how the user says the same.
    """
    words = OwnWords(tuple(typed))
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    said = [(*opened, words.speaker(*opened[:2])) for opened in doors.opened(plain)]
    asked = {each[0]: _problem(*each) for each in said if not _agreed(each[2], each[3])}
    if any(programs.is_about(key) for key in asked) and agreed.knows(_named(plain)):
        asked = {key: each for key, each in asked.items() if not programs.is_about(key)}
    if wrong := [*asked.values(), *credentials.refuse(config, words)]:
        raise UserError(*wrong)


def remember(config: DictConfig) -> None:
    """Called when a program is started that the user has agreed to: a resume may start it again."""
    plain = OmegaConf.to_container(config, resolve=False)
    if programs.is_program(config) and isinstance(plain, dict):
        agreed.remember(_named(plain))


def _named(plain: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in plain.items()}


def repeated(typed: Sequence[Override]) -> list[str]:
    """The overrides that say what executes something, or where credentials go: a resume needs them
    again, because the run's own files cannot say it."""
    keys = [(override.key_or_group, str(override.input_line)) for override in typed]
    return [text for key, text in keys if doors.names(key) or credentials.names(key, text)]


def asked_again(typed: Sequence[Override]) -> list[str]:
    """As `repeated`, without the program that was started, which is remembered here, and without
    deletions, which no resume takes."""
    kept = [each for each in typed if not each.is_delete()]
    return repeated([each for each in kept if not programs.is_about(each.key_or_group)])


def _agreed(door: doors.Door, speaker: Speaker) -> bool:
    if speaker is Speaker.CONF:
        return door.conf
    return speaker is not Speaker.ELSEWHERE


def _problem(key: str, value: object, door: doors.Door, speaker: Speaker) -> Problem:
    text = _typed(value)
    who = "./conf" if speaker is Speaker.CONF else "the file that says it"
    what = f"{redact(text)} is {door.what}, and {who} cannot agree to that in your name"
    override = f"{key}=[{text}]" if door.each == "element" else f"{key}={text}"
    # The value may be anybody's text, and the command is there to be copied into a shell.
    return Problem(
        key,
        what=what,
        remedy=f"if you trust it: {shlex.quote(redact(override))}, or allow it in {trust.file()}",
        code="private",
    )


def _typed(value: object) -> str:
    """A value as Hydra reads it on the command line, in one line of printable text."""
    if isinstance(value, str) and value.isprintable() and value == value.strip():
        return value
    return json.dumps(value)
