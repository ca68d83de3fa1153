"""JSON Schemas of draft 7 put together: of values that a person writes in a config file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Schema = dict[str, Any]

ANYTHING: Schema = {}
# What may stand for any value: ${...}, and ??? for a value that is still to be given.
WRITTEN = r"\$\{|^\?\?\?$"
WRITTEN_TEXT: Schema = {"type": "string", "pattern": WRITTEN}
_HERE = "#/definitions/"
# Keywords that concern values of their own type alone, so that types may stand beside each other.
_OF_NUMBERS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def types(schema: Mapping[str, Any]) -> list[str]:
    """The types of a schema that says them; else empty."""
    named = schema.get("type", [])
    return [named] if isinstance(named, str) else [*named]


def united(schemas: Iterable[Schema]) -> Schema:
    """What fits any of several schemas, as one with several types where that says the same."""
    distinct = list[Schema]()
    for schema in schemas:
        members = schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
        distinct += [each for each in members if each not in distinct]
    if ANYTHING in distinct or not distinct:
        return {}
    plain = [each for each in distinct if _is_plain(each)]
    rest = [each for each in distinct if not _is_plain(each)]
    together: Schema = {"type": list(dict.fromkeys(t for each in plain for t in types(each)))}
    for each in plain:
        bounds = {key: each[key] for key in _OF_NUMBERS if key in each}
        if any(_bounds_differ(each, other) for other in plain):
            return {"anyOf": distinct}
        together |= bounds
    if len(together["type"]) == 1:
        (together["type"],) = together["type"]
    merged = [together, *rest] if plain else rest
    return merged[0] if len(merged) == 1 else {"anyOf": merged}


def _is_plain(schema: Schema) -> bool:
    return "type" in schema and set(schema) <= {"type", *_OF_NUMBERS}


def _bounds_differ(one: Schema, other: Schema) -> bool:
    """Whether two schemas of numbers have other limits."""
    numbers = {"integer", "number"}
    both = numbers & {*types(one)} and numbers & {*types(other)}
    return bool(both) and any(one.get(key) != other.get(key) for key in _OF_NUMBERS)


def both(one: Schema | None, other: Schema | None) -> Schema:
    """What fits two schemas, of which each may be unknown."""
    known = [each for each in (one, other) if each]
    if len(known) == 2:
        return {"allOf": known}
    return known[0] if known else {}


def written(schema: Schema) -> Schema:
    """A schema that an interpolation and `???` fit as well."""
    if not schema or schema == {"type": "string"}:
        return schema
    if _is_plain(schema) and "string" not in types(schema):
        return {**schema, "type": [*types(schema), "string"], "pattern": WRITTEN}
    return united([schema, WRITTEN_TEXT])


def reference(name: str) -> Schema:
    return {"$ref": f"{_HERE}{name}"}


def described(schema: Schema, text: str) -> Schema:
    """With a description. Beside a reference, draft 7 ignores everything else."""
    if not text:
        return schema
    return {**({"allOf": [schema]} if "$ref" in schema else schema), "description": text}


def switch(cases: Sequence[tuple[Schema, Schema]]) -> Schema:
    """For each condition that a value fulfils, what else it must fulfil."""
    return {"allOf": [{"if": condition, "then": then} for condition, then in cases]}


def or_node(schema: Schema) -> Schema:
    """A schema that a node, which is built, fits as well."""
    if not schema or "object" in types(schema):
        return schema
    if set(schema) <= {"type", "pattern", *_OF_NUMBERS}:
        return {**schema, "type": [*types(schema), "object"], "required": ["_target_"]}
    return united([schema, {"type": "object", "required": ["_target_"]}])


def of_pydantic(schema: object) -> Schema:
    """A schema that pydantic wrote of a field, without its titles and defaults, in which each value
    may be an interpolation."""
    return written(_without_titles(schema))


def _without_titles(schema: object) -> Schema:
    assert isinstance(schema, dict)
    kept = {key: value for key, value in schema.items() if key not in ("title", "default")}
    if "anyOf" in kept:
        return united(map(_without_titles, kept["anyOf"]))
    if "items" in kept:
        kept["items"] = of_pydantic(kept["items"])
    if isinstance(kept.get("additionalProperties"), dict):
        kept["additionalProperties"] = of_pydantic(kept["additionalProperties"])
    if kept.get("additionalProperties") is True:
        del kept["additionalProperties"]
    if "const" in kept:
        kept = {"enum": [kept["const"]]}
    if "enum" in kept:
        kept.pop("type", None)
    return kept


def closed_over(document: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """A document with the definitions that it refers to, directly or not."""
    needed = dict[str, Schema]()
    waiting = [*_references(document)]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed[name] = definitions[name]
            waiting += _references(definitions[name])
    return {**document, "definitions": {name: needed[name] for name in sorted(needed)}}


def _references(node: object) -> Iterable[str]:
    if isinstance(node, dict):
        if str(node.get("$ref")).startswith(_HERE):
            yield node["$ref"].removeprefix(_HERE)
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)
