"""What of a config does not fit its typed sections (`schema`), and what to write instead."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from distdl.config import choices
from distdl.config.hints import words
from distdl.config.paths import path_text
from distdl.config.programs import is_program
from distdl.config.recipe import LAYERS
from distdl.config.schema import COLLECTIONS, COMPONENTS, Config, ProgramConfig
from distdl.util import typed
from distdl.util.errors import Problem
from distdl.util.suggest import did_you_mean, meanings, written
from distdl.util.typed import Misfit, Path

Known = Callable[[], Iterable[str]]


def check(
    values: Mapping[str, Any], *, show: Callable[[Path], str], known: Known
) -> Iterator[Problem]:
    """Checks resolved values against the schema. `show` formats the value at a path, without values
    of the environment; `known` lists paths to suggest, if there is an unknown one."""
    wrong: list[Misfit] = []
    for misfit in _misfits(values):
        path = misfit.path
        if misfit.kind == "extra_forbidden":
            yield from _unknown(path, _at(values, path), known, values)
        elif misfit.kind == "missing":
            yield _absent(path, misfit.below, _at(values, path), known, values)
        else:
            wrong.append(misfit)
    for path, same in typed.by_path(wrong).items():
        either = typed.either(same)
        yield Problem(
            path_text(path),
            what=f"must be {either}, not {show(path)}",
            remedy=_remedy(path, either, values),
            code=same[0].code,
        )


def _misfits(values: Mapping[str, Any]) -> Iterator[Misfit]:
    """What does not fit the schema."""
    if is_program(values):
        try:
            ProgramConfig.model_validate(values)
        except ValidationError as refused:
            yield from typed.misfits(refused, values)
        return
    # `optimizer=none` composes to an empty mapping, which means null.
    empty = {key: None for key in COMPONENTS if key != "task" and values.get(key) == {}}
    try:
        Config.model_validate({**values, **empty})
    except ValidationError as refused:
        yield from typed.misfits(refused, values)


def _at(values: Any, path: Path) -> object:  # noqa: ANN401 - nested mappings and lists
    return functools.reduce(operator.getitem, path, values)


def _replaced(node: object, path: Path, value: object) -> object:
    """A copy of nested containers with another value at a path."""
    if not path:
        return value
    if isinstance(node, dict):
        return {**node, path[0]: _replaced(node[path[0]], path[1:], value)}
    assert isinstance(node, list)
    items = enumerate(node)
    return [_replaced(item, path[1:], value) if i == path[0] else item for i, item in items]


def _unknown(
    path: Path, value: object, known: Known, config: Mapping[str, Any]
) -> Iterator[Problem]:
    """One problem for an unknown key, or one for each value below it: `optimiser: {lr: 1}`."""
    text = path_text(path)
    section = path_text(path[:-1])
    if path[0] in LAYERS:
        yield words.not_global(str(path[0]))
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _unknown((*path, key), item, known, config)
    else:
        yield Problem(
            text,
            what=f"unknown key in {section or 'the config'}",
            remedy=words.for_key(text, value, config) or did_you_mean(text, known()),
            code="unknown-key",
        )


def _absent(
    path: Path, deeper: Path, value: object, known: Known, config: Mapping[str, Any]
) -> Problem:
    text = path_text(path)
    if deeper[-1:] != ("_target_",):
        full = path_text((*path, *deeper))
        return Problem(full, what="missing", remedy=f"write {full}=...", code="missing-key")
    assert isinstance(value, Mapping)  # which lacks it
    keys = ", ".join(map(str, value)) or "nothing"
    what = f"names no class (_target_), only {keys}"
    choose = f"choose one: {text}=NAME (--help lists them)"
    remedy = f"{choose}, or write in a file: _target_: package.Class"
    if path[0] in COLLECTIONS:
        near = did_you_mean(text, [name for name in known() if name.count(".") == 1])
        remedy = words.for_key(text) or near or f"write +{text}._target_=package.Class"
        if option := words.for_component(str(path[0]), str(path[-1]), config):
            remedy = " ".join([option, *(f"{text}.{key}=..." for key in value or ())])
    elif path[0] in ("optimizer", "schedule") and value:
        what = f"names no class (_target_) to take {keys} ({text}=none, or an incomplete file)"
        argument = f"the model's own argument, such as model.{next(iter(value))}=..."
        remedy = f"{argument}, or {choose}"
    return Problem(text, what=what, remedy=remedy, code="missing-key")


def _remedy(path: Path, expected: str, values: Mapping[str, Any]) -> str:
    value = _at(values, path)
    text = path_text(path)
    if path == ("strategy",) and isinstance(value, str):
        return words.strategy_for(value)
    if path == ("checkpoint",):
        return words.for_key("ckpt_path")
    if path == ("trainer", "precision"):
        return words.precision_for(str(value))
    if expected == "a string" and isinstance(value, (int, float)):
        # Without the inner quotes Hydra reads digits as a number again.
        return f"""write {text}='"{value}"'"""
    word = choices.word_of(text)
    if word and isinstance(value, str):
        return f"write {written(text, word)}, or a number"
    for meant in meanings(value) if path else ():
        section = str(path[0])
        changed = {**values, section: _replaced(values[section], path[1:], meant)}
        if path not in (misfit.path for misfit in _misfits(changed)):
            return f"write {written(text, meant)}"
    return ""
