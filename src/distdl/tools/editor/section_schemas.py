"""JSON Schemas of the sections of a config, and of the files of their groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from distdl.config.hints.words import TRAINER_OWNED
from distdl.config.schema import COLLECTIONS, COMPONENTS, TrainerArguments
from distdl.tools.editor.algebra import Schema, described, reference, switch
from distdl.tools.editor.arguments import TRAINER
from distdl.tools.editor.named_classes import NamedClasses
from distdl.tools.editor.node_schemas import NODE, NodeSchemas
from distdl.tools.editor.shapes import NodeShape, fields, of_class, union

EXPERIMENT = "experiment"
# Keys of a whole config, written into a file of a group with `# @package _global_`.
GLOBAL = (*COMPONENTS, *COLLECTIONS, "trainer", "checkpoint", "project", "program")


@dataclass(frozen=True)
class SectionSchemas:
    """The definitions of each section, by name: of the section, of its classes, of a choice that a
    defaults list makes (`model=resnet50`), and of a file of its group.

    Args:
        classes: What its nodes may name.
    """

    classes: NamedClasses

    @property
    def nodes(self) -> NodeSchemas:
        return NodeSchemas(self.classes)

    def of_component(self, section: str) -> dict[str, Schema]:
        """The definitions of a section that is one node."""
        found = {f"{section}.classes": self.nodes.switch(section)}
        for target in self.classes.targets(section):
            shape = self.classes.shape_of_target(section, target)
            found[f"{section}.{target}"] = self.nodes.mapping(_with_defaults(shape, section))
        shapes = [
            self.classes.chosen_or_not(option, content, section, path)
            for option, content, path in self.classes.contents(section)
            if "_target_" in content
        ]
        whole = _with_defaults(union(shapes), section)
        found[section] = self.nodes.node(section, whole)
        choices = self.classes.options.by_group.get(section, {})
        for name, option in choices.items():
            content = self.classes.options.merged(option)
            chosen = whole
            if "_target_" in content:
                shape = self.classes.shape(option, content, section, "")
                chosen = _with_defaults(shape, section)
            found[f"{section}={name}"] = self.nodes.node(section, chosen)
        known: Schema = {"contains": {"enum": [*choices]}}
        by_defaults = {
            "if": {"required": ["defaults"], "properties": {"defaults": known}},
            "then": switch(
                [(_builds_on(name, choices), reference(f"{section}={name}")) for name in choices]
            ),
            "else": reference(section),
        }
        found[f"file.{section}"] = file_of(by_defaults, whole.keys)
        return found

    def of_collection(self, section: str) -> dict[str, Schema]:
        """The definitions of a section with nodes by names of the user's."""
        found = {f"{section}.classes": self.nodes.switch(section)}
        for target in self.classes.targets(section):
            shape = of_class(self.classes.arguments(target), section)
            found[f"{section}.{target}"] = self.nodes.mapping(shape)
        by_name: dict[str, list[NodeShape]] = {}
        for option, content, path in self.classes.contents(section):
            for name, node in content.items():
                if isinstance(node, dict) and "_target_" in node:
                    inner = f"{path}.{name}".removeprefix(".")
                    of_name = by_name.setdefault(name, [])
                    of_name.append(self.classes.shape(option, node, section, inner))
        properties = {name: self.nodes.node(section, union(each)) for name, each in by_name.items()}
        classes = {"allOf": [reference(f"{section}.classes")]}
        unknown = {**NODE, "required": ["_target_"], **classes}
        found[section] = {**NODE, "properties": properties, "additionalProperties": unknown}
        with_defaults = {**properties, "defaults": reference(f"defaults.{section}")}
        whole = {**found[section], "properties": with_defaults}
        found[f"file.{section}"] = file_of(whole, by_name)
        return found

    def of_trainer(self) -> dict[str, Schema]:
        """The definitions of the Trainer's arguments."""
        signature = self.classes.arguments(TRAINER)
        given = {name: each for name, each in signature.keys.items() if name not in TRAINER_OWNED}
        about: dict[str, str] = {}
        for option in self.classes.options.by_group.get("trainer", {}).values():
            about |= self.classes.options.comments(option)
        keys = {
            name: described(each, about.get(name, ""))
            for name, each in {**given, **fields(TrainerArguments)}.items()
        }
        shape = NodeShape({**keys, "defaults": reference("defaults.trainer")}, signature.more)
        section = {**NODE, **self.nodes.mapping(shape), "patternProperties": {}}
        return {"trainer": section, "file.trainer": file_of(section, {})}


def _with_defaults(shape: NodeShape, section: str) -> NodeShape:
    """A file has a defaults list beside the keys of its section."""
    return NodeShape({**shape.keys, "defaults": reference(f"defaults.{section}")}, shape.more)


def file_of(content: Schema, own: Collection[str]) -> Schema:
    """A file of a group: its section, or with `# @package _global_` a part of a whole config,
    which is known by the names of sections that the section itself has not (`own`)."""
    elsewhere = [name for name in GLOBAL if name not in own]
    return {
        "type": ["object", "null"],
        "if": {
            "not": {"required": ["_target_"]},
            "anyOf": [{"required": [name]} for name in elsewhere],
        },
        "then": reference(f"file.{EXPERIMENT}"),
        "else": content,
    }


def _builds_on(name: str, names: Iterable[str]) -> Schema:
    """Whether a file of a group builds on this option of it, and on no other one."""
    others = {"contains": {"enum": [each for each in names if each != name]}}
    alone = {"allOf": [{"contains": {"const": name}}, {"not": others}]}
    return {"required": ["defaults"], "properties": {"defaults": alone}}
