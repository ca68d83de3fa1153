"""Spaces in files: `tune=NAME` stands for the lines of `conf/tune/NAME.yaml`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, OmegaConf

from distdl.config import groups
from distdl.util.errors import Problem, UserError

GROUP = "tune"
WORD = re.compile(rf"\+?{GROUP}=(?:\[(?P<several>[^\]]*)\]|(?P<one>[^\[{{(]*))")
PLAIN = re.compile(r"[\w./+-]+", re.ASCII)  # text that Hydra reads without quotes


def expanded(words: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """The words of a command line, with the lines of files in place of `tune=NAME`. What is typed
    for a key replaces a file's line.

    Raises:
        UserError: There is no such file, or it is none of lines `key: space`.
    """
    typed = [word for word in words if not WORD.fullmatch(word)]
    keys = {_key(word) for word in typed}
    lines: dict[str, str] = {}
    problems: list[Problem] = []
    for name in _names(words):
        with groups.hydra_session(config_dirs):
            found = _lines(name)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            lines |= found
    if problems:
        raise UserError(*problems)
    return [*(word for key, word in lines.items() if key not in keys), *typed]


def _names(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if match := WORD.fullmatch(word):
            names = match["several"].split(",") if match["one"] is None else [match["one"]]
            yield from (name.strip() for name in names)


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _lines(name: str) -> dict[str, str] | Problem:
    """Key to word, or what is wrong with the file; needs a `hydra_session`."""
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if name not in groups.group_options(GROUP):
        return groups.no_option(GROUP, name)
    repository = GlobalHydra.instance().config_loader().repository  # type: ignore[attr-defined]
    path = f"{GROUP}/{name}.yaml"
    example = "lines such as: optimizer.lr: tag(log, interval(0.01, 1))"
    try:
        config = repository.load_config(f"{GROUP}/{name}").config
    except (YAMLError, OmegaConfBaseException) as error:
        return Problem(path, what=f"cannot be read: {error}", remedy=example, code="unreadable")
    if not isinstance(config, DictConfig) or not len(config):
        return Problem(path, what="has no lines", remedy=example, code="wrong-kind")
    values = OmegaConf.to_container(config, resolve=False)
    return {key: f"{key}={_text(value)}" for key, value in _leaves(values, "")}


def _leaves(node: object, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: object) -> str:
    """A value of a file as it is typed: a text is Hydra's syntax, and a list are choices."""
    if isinstance(value, list):
        return f"choice({','.join(map(_item, value))})"
    return value if isinstance(value, str) else _item(value)


def _item(value: object) -> str:
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
