"""JSON Schemas of nodes: mappings that name a class, with its arguments and the nodes inside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from distdl.config.schema import Component
from distdl.tools.editor import algebra
from distdl.tools.editor.algebra import (
    WRITTEN,
    WRITTEN_TEXT,
    Schema,
    described,
    reference,
    types,
)
from distdl.tools.editor.arguments import HOMES
from distdl.tools.editor.named_classes import NamedClasses
from distdl.tools.editor.shapes import NodeShape, fields

_DOTTED = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"
# Hydra's own keys of a node.
_HYDRAS = r"^_(target|partial|recursive|convert|args)_$"
NAMES_TARGET: Schema = {"type": "object", "required": ["_target_"]}
NODE: Schema = {"type": ["object", "string", "null"], "pattern": WRITTEN}


@dataclass(frozen=True)
class NodeSchemas:
    """The schemas of nodes of any section.

    Args:
        classes: What the nodes may name.
    """

    classes: NamedClasses

    def any_value(self) -> Schema:
        """Any value, inside which each node has the arguments of its class."""
        return {
            "if": NAMES_TARGET,
            "then": reference("part"),
            "else": {"additionalProperties": reference("any"), "items": reference("any")},
        }

    def node(self, section: str, otherwise: NodeShape) -> Schema:
        """A section, or a node of a collection: its class is named, or was chosen elsewhere."""
        return {
            **NODE,
            "if": NAMES_TARGET,
            "then": reference(f"{section}.classes"),
            "else": self.mapping(otherwise),
        }

    def switch(self, section: str) -> Schema:
        """A node that names its class."""
        targets = self.classes.targets(section)
        cases = [
            (_names(target), reference(f"{section}.{target}"))
            for target in targets
            if not self.classes.arguments(target).unread
        ]
        hydras = {**fields(Component), "_target_": self._target(section, targets)}
        return {"properties": hydras, **algebra.switch(cases)}

    def _target(self, section: str, targets: Sequence[str]) -> Schema:
        """A `_target_`: one that is known, or one of which nothing is known here."""
        homes = HOMES.get(section, ())
        known = sorted({*targets, *self.classes.known.homes.get(section, ())})
        other: Schema = {"type": "string", "pattern": _DOTTED}
        if homes and self.classes.known.homes:
            inside = "|".join(map(re.escape, homes))
            other["not"] = {"pattern": rf"^({inside})\.\w+$"}
        return {"anyOf": [{"enum": known}, other, WRITTEN_TEXT]}

    def mapping(self, shape: NodeShape) -> Schema:
        """A mapping of a shape."""
        properties = {name: self._value(each) for name, each in shape.keys.items()}
        return {
            "properties": properties,
            "patternProperties": {_HYDRAS: {}},  # which `switch` looks at
            "additionalProperties": reference("any") if shape.more else False,
        }

    def _value(self, value: Schema | NodeShape) -> Schema:
        """A value of an argument, inside which each node has the arguments of its class."""
        if isinstance(value, NodeShape):
            inside = {
                "if": NAMES_TARGET,
                "then": reference("any"),
                "else": {"if": {"type": "object"}, "then": self.mapping(value)},
            }
            if value.otherwise:
                inside["else"]["else"] = value.otherwise
            return described(inside, value.about)
        text = value.get("description", "")
        bare = {key: each for key, each in value.items() if key != "description"}
        if not bare:
            return described(reference("any"), text)
        if "array" not in types(bare):
            return value
        return described({"allOf": [bare, reference("any")]}, text)


def _names(target: str) -> Schema:
    """Whether a node names this class."""
    return {"required": ["_target_"], "properties": {"_target_": {"const": target}}}
