"""Compares existing with wanted resources, and builds the smallest request for a change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter, ValidationError

from distdl.launchers.azureml.provision.values import Ref, Resource

ISO_DURATION = TypeAdapter(timedelta)
# Keys that Azure adds to every resource but does not accept in a request.
READ_ONLY = ("id", "name", "type", "systemData", "etag")


class Action(StrEnum):
    CREATE = "create"
    CHANGE = "differs"
    UNCHANGED = "unchanged"
    FIXED = "cannot change"


@dataclass(frozen=True)
class Difference:
    """A value in a body, at a dotted path, that differs from the wanted one."""

    path: tuple[str, ...]
    now: Any
    wanted: Any

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {_short(self.now)} -> {_short(self.wanted)}"


@dataclass(frozen=True)
class ResourceStep:
    """What to do about one resource."""

    resource: Resource  # the wanted one
    actual: Mapping[str, Any] | None  # as Azure describes it; None if it does not exist
    differences: tuple[Difference, ...] = ()  # between the two, in the keys of the wanted body

    @property
    def fixed(self) -> list[Difference]:
        """Differences that Azure cannot change."""
        fixed = tuple(f"{path}." for path in self.resource.fixed)
        return [d for d in self.differences if f"{'.'.join(d.path)}.".startswith(fixed)]

    @property
    def action(self) -> Action:
        if self.actual is None:
            return Action.CREATE
        if self.fixed:
            return Action.FIXED
        return Action.CHANGE if self.differences else Action.UNCHANGED

    def request(self, known: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The request's method and body; `known` has Azure's answers by ARM id, for references.

        To create a resource, the wanted body is sent. A change keeps settings made by others: PATCH
        sends the sections that differ, PUT the entire body, both with the wanted values merged in.
        """
        wanted = resolve(self.resource.body, known)
        if self.actual is None:
            return "PUT", wanted
        merged = merge(self.actual, wanted)
        assert isinstance(merged, dict)
        if not self.resource.patch:
            return "PUT", {key: value for key, value in merged.items() if key not in READ_ONLY}
        body: dict[str, Any] = {}
        for difference in self.differences:
            section, *inner = difference.path[:2]
            if inner and isinstance(merged[section], Mapping):
                body.setdefault(section, {})[inner[0]] = merged[section][inner[0]]
            else:
                body[section] = merged[section]
        return "PATCH", body


def resolve(body: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """A body with references replaced by their values; references without a known value stay."""

    def value_of(ref: Ref) -> object:
        value: object = known.get(ref.id)
        for part in ref.path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return ref if value is None else value

    return replaced(body, value_of)


def replaced(body: Mapping[str, Any], replacement: Callable[[Ref], object]) -> dict[str, Any]:
    """A body with each reference replaced by `replacement(reference)`."""
    return {key: _replaced(value, replacement) for key, value in body.items()}


def _replaced(value: object, replacement: Callable[[Ref], object]) -> object:
    if isinstance(value, Mapping):
        return replaced(value, replacement)
    if isinstance(value, list):
        return [_replaced(item, replacement) for item in value]
    return replacement(value) if isinstance(value, Ref) else value


def differences(wanted: object, actual: object, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Yields differences in the keys of `wanted`; other keys, such as server defaults, are ignored.

    Each item of a wanted list must be in the actual list, which may have more items.
    """
    if isinstance(wanted, Mapping) and isinstance(actual, Mapping):
        for key, value in wanted.items():
            yield from differences(value, actual.get(_spelling(actual, key)), (*path, key))
        return
    equal = not wanted if isinstance(wanted, Mapping) else same(wanted, actual)
    if isinstance(wanted, list):
        items = actual if isinstance(actual, list) else []
        equal = all(_contains(items, item) for item in wanted)
    if not equal:
        yield Difference(path, actual, wanted)


def same(wanted: object, actual: object) -> bool:
    """Equality that ignores case, blanks and units of time, all of which Azure may change."""
    if isinstance(wanted, str) and isinstance(actual, str):
        left, right = (text.replace(" ", "").casefold() for text in (wanted, actual))
        return left == right or (_duration(wanted) or wanted) == (_duration(actual) or actual)
    return type(wanted) is type(actual) and bool(wanted == actual)


def merge(actual: object, wanted: object) -> object:
    """The actual value, updated with the wanted one. Nothing is removed."""
    if wanted == {}:  # a marker, such as an identity, whose content Azure decides
        return {}
    if isinstance(wanted, Mapping) and isinstance(actual, Mapping):
        spelled = {_spelling(actual, key): value for key, value in wanted.items()}
        return {**actual, **{key: merge(actual.get(key), spelled[key]) for key in spelled}}
    if isinstance(wanted, list) and isinstance(actual, list):
        items = list(actual)
        for item in wanted:
            namesake = _namesake(item, items)
            if namesake is not None:
                items[namesake] = merge(items[namesake], item)
            elif not _contains(items, item):
                items.append(item)
        return items
    return actual if same(wanted, actual) else wanted


def _contains(items: list[Any], wanted: object) -> bool:
    return any(not list(differences(wanted, item)) for item in items)


def _namesake(wanted: object, items: list[Any]) -> int | None:
    """The index of the item with the same name, in a list of named items."""
    if not isinstance(wanted, Mapping) or "name" not in wanted:
        return None
    names = [item.get("name") if isinstance(item, Mapping) else None for item in items]
    return next((i for i, name in enumerate(names) if same(wanted["name"], name)), None)


def _spelling(actual: Mapping[str, Any], key: str) -> str:
    """The spelling of a key in Azure's answer: the case of ARM ids may be different there."""
    if key in actual or not key.startswith("/"):
        return key
    return next((other for other in actual if other.casefold() == key.casefold()), key)


def _duration(text: str) -> timedelta | None:
    """An ISO 8601 duration, so that PT300S equals PT5M; None for other text."""
    try:
        return ISO_DURATION.validate_python(text) if text.startswith("P") else None
    except ValidationError:
        return None


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 90 else f"{text[:87]}..."
