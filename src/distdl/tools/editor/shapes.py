"""What a node of a config may hold, by the class that it names, from options and signatures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from distdl.config.schema import Component, Data, Optimizer, Schedule
from distdl.tools.editor.algebra import Schema, both, described, of_pydantic, united
from distdl.tools.editor.arguments import PART, Arguments
from distdl.validation.binder import SUPPLIED

# Sections with keys that distdl reads itself.
TYPED: Mapping[str, type[BaseModel]] = {"data": Data, "optimizer": Optimizer, "schedule": Schedule}


@dataclass(frozen=True)
class NodeShape:
    """What a mapping may hold.

    Args:
        keys: A schema for each key, or the shape of a node inside.
        more: Whether it may have other keys.
        otherwise: What fits in place of the mapping.
        about: A description.
    """

    keys: Mapping[str, Schema | NodeShape] = field(default_factory=dict)
    more: bool = False
    otherwise: Schema = field(default_factory=dict)
    about: str = ""


ANY = NodeShape(more=True)


def fields(kind: type[BaseModel]) -> dict[str, Schema]:
    """The fields of a section that distdl reads itself. Those of its own classes are left out."""
    properties = kind.model_json_schema()["properties"]
    return {name: of_pydantic(each) for name, each in properties.items() if "$ref" not in each}


def typed_fields(section: str) -> dict[str, Schema]:
    inherited = fields(Component)
    all_fields = fields(TYPED[section]) if section in TYPED else {}
    return {name: each for name, each in all_fields.items() if name not in inherited}


def of_class(arguments: Arguments, section: str) -> NodeShape:
    """What a node of a class may hold: its arguments without those that the builder passes, and the
    keys that the builder takes out."""
    table = SUPPLIED.get(section, {})
    supplied = table.get("supplied", ())
    # A class of tasks, other than a function, is made of the node's own keys.
    by_builder = section != "task" or arguments.positional[:1] == supplied
    passed = arguments.positional[: len(supplied)] if by_builder else ()
    keys: dict[str, Schema] = {n: s for n, s in arguments.keys.items() if n not in passed}
    typed = typed_fields(section)
    for name in table.get("consumed", ()):
        keys.setdefault(name, {})
    for name in table.get("null_is_absent", ()):
        keys.setdefault(name, {"type": "null"})
    keys = {name: both(each, typed.get(name)) for name, each in keys.items()}
    return NodeShape(keys, arguments.more)


def of_node(
    content: Mapping[str, Any],
    section: str,
    classes: Mapping[str, Arguments],
    about: Mapping[str, str],
    path: str = "",
) -> NodeShape:
    """What may be written over a node: keys of its class, and of the classes of nodes inside it.

    Args:
        content: As it is composed. Without a `_target_`, its class is not known here.
        section: `model`, or PART for a node inside another one.
        about: The comments of the file, by dotted path.
        path: Of the node in the file.
    """
    target = content.get("_target_")
    shape = of_class(classes.get(str(target), Arguments()), section) if target else ANY
    keys = dict(shape.keys)
    typed = typed_fields(section)
    for name, value in content.items():
        inner = f"{path}.{name}".removeprefix(".")
        known = keys.get(name)
        if isinstance(value, dict) and "_target_" in value:
            nested = of_node(value, PART, classes, about, inner)
            plain = known if isinstance(known, dict) else {}
            keys[name] = replace(nested, otherwise=plain, about=about.get(inner, ""))
        elif isinstance(known, dict):
            keys[name] = described(known, about.get(inner, ""))
        elif shape.more and not name.startswith("_"):
            keys[name] = described(typed.get(name, {}), about.get(inner, ""))
    return replace(shape, keys=keys)


def union(shapes: Iterable[NodeShape]) -> NodeShape:
    """What fits any of several shapes."""
    several = [*shapes]
    names = dict.fromkeys(name for shape in several for name in shape.keys)
    return NodeShape({name: _of_key(name, several) for name in names}, any(s.more for s in several))


def _of_key(name: str, shapes: Iterable[NodeShape]) -> Schema | NodeShape:
    # Where a shape takes any key, it takes any value of this one.
    found = [shape.keys.get(name, {}) for shape in shapes if name in shape.keys or shape.more]
    inner = [each for each in found if isinstance(each, NodeShape)]
    plain = [each for each in found if not isinstance(each, NodeShape)]
    if inner and not plain:
        texts = [each.about for each in inner if each.about]
        otherwise = united(each.otherwise for each in inner)
        return replace(union(inner), otherwise=otherwise, about=texts[0] if texts else "")
    if inner:
        return {}
    texts = [each["description"] for each in plain if "description" in each]
    bare = united(
        {key: value for key, value in each.items() if key != "description"} for each in plain
    )
    return described(bare, texts[0] if texts else "")
