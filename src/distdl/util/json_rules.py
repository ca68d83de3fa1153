"""Rules for JSON that may come from somebody else: what a model folder may say.

A rule takes a value and where it stands, and returns the value or raises Unsafe. A record returns
a copy with the known keys alone, so what was not checked is not passed on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
Rule = Callable[[object, str], T]


class Unsafe(ValueError):
    """A part of a model file that distdl does not write, and that could run code or do harm."""


def shown(value: object) -> str:
    """Any value in one short line of printable text."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def text(pattern: str, what: str) -> Rule[str]:
    expected = re.compile(pattern, re.ASCII)

    def rule(value: object, where: str) -> str:
        if not (isinstance(value, str) and expected.fullmatch(value)):
            raise Unsafe(f"{where}: {shown(value)} is not {what}")
        return value

    return rule


def whole(low: int = -(2**63), high: int = 2**63 - 1) -> Rule[int]:
    def rule(value: object, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise Unsafe(f"{where}: {shown(value)} is not a whole number from {low} to {high}")
        return value

    return rule


def one_of(*values: T) -> Rule[T]:
    def rule(value: object, where: str) -> T:
        for each in values:
            if type(value) is type(each) and value == each:
                return each
        raise Unsafe(f"{where}: {shown(value)} is not {' or '.join(map(repr, values))}")

    return rule


def flag(value: object, where: str) -> bool:
    return one_of(True, False)(value, where)


def real(value: object, where: str) -> float | str:
    if type(value) is int or type(value) is float:
        return value
    return text(r"-?Infinity|NaN", "a number")(value, where)


def maybe(rule: Rule[T]) -> Rule[T | None]:
    return lambda value, where: None if value is None else rule(value, where)


def listed(rule: Rule[T]) -> Rule[list[T]]:
    def taken(value: object, where: str) -> list[T]:
        if not isinstance(value, list):
            raise Unsafe(f"{where}: {shown(value)} is not a list")
        return [rule(each, f"{where}[{i}]") for i, each in enumerate(value)]

    return taken


def mapping(key: Rule[str], rule: Rule[T]) -> Rule[dict[str, T]]:
    def taken(value: object, where: str) -> dict[str, T]:
        if not isinstance(value, dict):
            raise Unsafe(f"{where}: {shown(value)} is not a mapping")
        return {key(k, where): rule(each, f"{where}.{k}") for k, each in value.items()}

    return taken


def dropped(empty: T) -> Rule[T]:
    """Takes anything, and passes on that nothing was there."""
    return lambda value, where: empty


def record(**rules: Rule[Any]) -> Rule[dict[str, Any]]:
    """A mapping with some of these keys. Others of a newer torch must be empty, and are dropped."""

    def taken(value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Unsafe(f"{where}: {shown(value)} is not a mapping")
        for key in value.keys() - rules.keys():
            if value[key] not in (None, False, "", [], {}):
                raise Unsafe(f"{where}: {shown(key)} is not a key that distdl writes")
        return {key: rules[key](value[key], f"{where}.{key}") for key in rules if key in value}

    return taken


def union(**rules: Rule[Any]) -> Rule[dict[str, Any]]:
    """A mapping with exactly one of these keys, as torch's schema marks the kind of a value."""

    def taken(value: object, where: str) -> dict[str, Any]:
        held = value if isinstance(value, dict) else {}
        keys = [*held]
        if len(keys) > 1:
            keys = [key for key in keys if held[key] is not None]
        if len(keys) != 1 or keys[0] not in rules:
            named = ", ".join(map(shown, keys)) or shown(value)
            raise Unsafe(f"{where}: {named} is not a kind of value that distdl writes")
        return {keys[0]: rules[keys[0]](held[keys[0]], f"{where}.{keys[0]}")}

    return taken
