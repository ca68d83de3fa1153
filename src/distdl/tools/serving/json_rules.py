"""Rules for JSON that may come from somebody else: what a model folder may say.

A rule takes a value and where it stands, and returns the value or raises Unsafe. A record returns
a copy with the known keys alone, so what was not checked is not passed on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Rule = Callable[[Any, str], Any]


class Unsafe(ValueError):
    """A part of a model file that distdl does not write, and that could run code or do harm."""


def shown(value: Any) -> str:
    """Any value in one short line of printable text."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def text(pattern: str, what: str) -> Rule:
    expected = re.compile(pattern, re.ASCII)

    def rule(value: Any, where: str) -> Any:
        if not (isinstance(value, str) and expected.fullmatch(value)):
            raise Unsafe(f"{where}: {shown(value)} is not {what}")
        return value

    return rule


def whole(low: int = -(2**63), high: int = 2**63 - 1) -> Rule:
    def rule(value: Any, where: str) -> Any:
        if type(value) is not int or not low <= value <= high:
            raise Unsafe(f"{where}: {shown(value)} is not a whole number from {low} to {high}")
        return value

    return rule


def one_of(*values: Any) -> Rule:
    def rule(value: Any, where: str) -> Any:
        if not any(type(value) is type(each) and value == each for each in values):
            raise Unsafe(f"{where}: {shown(value)} is not {' or '.join(map(repr, values))}")
        return value

    return rule


def flag(value: Any, where: str) -> Any:
    return one_of(True, False)(value, where)


def real(value: Any, where: str) -> Any:
    if type(value) not in (int, float) and value not in ("Infinity", "-Infinity", "NaN"):
        raise Unsafe(f"{where}: {shown(value)} is not a number")
    return value


def maybe(rule: Rule) -> Rule:
    return lambda value, where: None if value is None else rule(value, where)


def listed(rule: Rule) -> Rule:
    def taken(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise Unsafe(f"{where}: {shown(value)} is not a list")
        return [rule(each, f"{where}[{i}]") for i, each in enumerate(value)]

    return taken


def mapping(key: Rule, rule: Rule) -> Rule:
    def taken(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise Unsafe(f"{where}: {shown(value)} is not a mapping")
        return {key(k, where): rule(each, f"{where}.{k}") for k, each in value.items()}

    return taken


def dropped(empty: Any) -> Rule:
    """Takes anything, and passes on that nothing was there."""
    return lambda value, where: empty


def record(**rules: Rule) -> Rule:
    """A mapping with some of these keys. Others of a newer torch must be empty, and are dropped."""

    def taken(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise Unsafe(f"{where}: {shown(value)} is not a mapping")
        for key in value.keys() - rules.keys():
            if value[key] not in (None, False, "", [], {}):
                raise Unsafe(f"{where}: {shown(key)} is not a key that distdl writes")
        return {key: rules[key](value[key], f"{where}.{key}") for key in rules if key in value}

    return taken


def union(**rules: Rule) -> Rule:
    """A mapping with exactly one of these keys, as torch's schema marks the kind of a value."""

    def taken(value: Any, where: str) -> Any:
        keys = [*value] if isinstance(value, dict) else []
        keys = [key for key in keys if value[key] is not None] if len(keys) > 1 else keys
        if len(keys) != 1 or keys[0] not in rules:
            named = ", ".join(map(shown, keys)) or shown(value)
            raise Unsafe(f"{where}: {named} is not a kind of value that distdl writes")
        return {keys[0]: rules[keys[0]](value[keys[0]], f"{where}.{keys[0]}")}

    return taken
