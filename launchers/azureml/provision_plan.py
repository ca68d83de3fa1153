"""What is there against what should be: the difference, and the smallest request that mends it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from distdl.launchers.azureml.provision_values import Ref, Resource

DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?)?")
# What Azure adds to every resource, and wants back from nobody.
READ_ONLY = ("id", "name", "type", "systemData", "etag")


class Action(StrEnum):
    CREATE = "create"
    CHANGE = "differs"
    UNCHANGED = "unchanged"
    FIXED = "cannot change"


@dataclass(frozen=True)
class Difference:
    """One value that is another one than wanted, at a dotted path of the body."""

    path: tuple[str, ...]
    now: Any
    wanted: Any

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {_short(self.now)} -> {_short(self.wanted)}"


@dataclass(frozen=True)
class Step:
    """What is to be done about one resource.

    Args:
        resource: As it should be.
        actual: As Azure has it, None where it does not exist.
        differences: In what the two differ, of the keys that distdl names.
    """

    resource: Resource
    actual: Mapping[str, Any] | None
    differences: tuple[Difference, ...] = ()

    @property
    def fixed(self) -> tuple[Difference, ...]:
        """Differences that Azure mends for nobody."""
        fixed = [tuple(path.split(".")) for path in self.resource.fixed]
        return tuple(d for d in self.differences if any(d.path[: len(p)] == p for p in fixed))

    @property
    def action(self) -> Action:
        if self.actual is None:
            return Action.CREATE
        if self.fixed:
            return Action.FIXED
        return Action.CHANGE if self.differences else Action.UNCHANGED

    def request(self, known: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Method and body.

        Creation sends what is wanted. A change leaves what others have set: PATCH sends the
        sections that differ, PUT everything that is there, each with our values put in.

        Args:
            known: ARM id -> what Azure answered about it, to resolve references.
        """
        wanted = resolve(self.resource.body, known)
        if self.actual is None:
            return "PUT", wanted
        whole = merge(self.actual, wanted)
        if not self.resource.patch:
            return "PUT", {key: value for key, value in whole.items() if key not in READ_ONLY}
        body: dict[str, Any] = {}
        for difference in self.differences:
            section, *inner = difference.path[:2]
            if inner and isinstance(whole[section], Mapping):
                body.setdefault(section, {})[inner[0]] = whole[section][inner[0]]
            else:
                body[section] = whole[section]
        return "PATCH", body


def step(resource: Resource, actual: Mapping[str, Any] | None, known: Mapping[str, Any]) -> Step:
    """Compares one resource."""
    if actual is None:
        return Step(resource, None)
    wanted = resolve(resource.body, known)
    return Step(resource, actual, tuple(differences(wanted, actual)))


def resolve(value: Any, known: Mapping[str, Any]) -> Any:
    """Puts in what is known for each reference; others stay as they are."""

    def answer(ref: Ref) -> Any:
        found: Any = known.get(ref.id)
        for part in ref.path.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return ref if found is None else found

    return replaced(value, answer)


def replaced(value: Any, other: Callable[[Ref], Any]) -> Any:
    """A body with what `other` makes of each reference in its place."""
    if isinstance(value, Mapping):
        return {key: replaced(item, other) for key, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, other) for item in value]
    return other(value) if isinstance(value, Ref) else value


def differences(wanted: Any, actual: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Only of keys in `wanted`: defaults of the server are no difference.

    Of a list, each wanted item must be there; others may be there too.
    """
    if isinstance(wanted, Mapping):
        if not isinstance(actual, Mapping):
            if wanted:
                yield Difference(path, actual, wanted)
            return
        for key, value in wanted.items():
            yield from differences(value, _get(actual, key), (*path, key))
    elif isinstance(wanted, list):
        there = actual if isinstance(actual, list) else []
        if not all(_position(item, there) is not None for item in wanted):
            yield Difference(path, actual, wanted)
    elif not same(wanted, actual):
        yield Difference(path, actual, wanted)


def same(wanted: Any, actual: Any) -> bool:
    """Equality as Azure means it: it answers in other capitals, units and spellings."""
    if isinstance(wanted, str) and isinstance(actual, str):
        left, right = (text.replace(" ", "").casefold() for text in (wanted, actual))
        times = (_seconds(wanted), _seconds(actual))
        return left == right or (times[0] is not None and times[0] == times[1])
    return type(wanted) is type(actual) and bool(wanted == actual)


def merge(actual: Any, wanted: Any) -> Any:
    """What is there with what is wanted put in; nothing is taken away."""
    if wanted == {}:  # a mark, such as an identity's: what Azure adds inside is its own
        return {}
    if isinstance(wanted, Mapping) and isinstance(actual, Mapping):
        merged = dict(actual)
        for key, value in wanted.items():
            there = _key(actual, key)
            merged[there] = merge(actual.get(there), value)
        return merged
    if isinstance(wanted, list) and isinstance(actual, list):
        items = list(actual)
        for item in wanted:
            namesake = _namesake(item, items)
            if namesake is not None:
                items[namesake] = merge(items[namesake], item)
            elif _position(item, items) is None:
                items.append(item)
        return items
    return actual if same(wanted, actual) else wanted


def _position(item: Any, items: Sequence[Any]) -> int | None:
    return next((i for i, x in enumerate(items) if not list(differences(item, x))), None)


def _namesake(item: Any, items: Sequence[Any]) -> int | None:
    """Where the item of the same name is, for lists whose items have names."""
    if not isinstance(item, Mapping) or "name" not in item:
        return None
    names = [x.get("name") if isinstance(x, Mapping) else None for x in items]
    return next((i for i, name in enumerate(names) if same(item["name"], name)), None)


def _key(actual: Mapping[str, Any], key: str) -> str:
    """ARM ids are keys too (userAssignedIdentities), in capitals that Azure chooses."""
    if key in actual or not key.startswith("/"):
        return key
    return next((k for k in actual if k.casefold() == key.casefold()), key)


def _get(actual: Mapping[str, Any], key: str) -> Any:
    return actual.get(_key(actual, key))


def _seconds(text: str) -> int | None:
    """Of an ISO 8601 duration: PT300S and PT5M are one."""
    found = DURATION.fullmatch(text)
    if not found or not any(found.groups()):
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 90 else f"{text[:87]}..."
