"""JSON Schemas of config files: of each group's options, of experiments, of a whole config.

Files hold a part of a config, so nothing is required, any value may be `${...}`, and what a section
may hold depends on the class that the file names, or on the option that its defaults list chooses.
The dialect is draft 7, which editors know best.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from distdl.config.hints.words import TRAINER_OWNED
from distdl.config.recipe import LAYERS
from distdl.config.schema import (
    COLLECTIONS,
    COMPONENTS,
    Checkpoint,
    Component,
    Config,
    Program,
    ProgramConfig,
    Project,
    TrainerArguments,
    WatchdogSettings,
)
from distdl.launch import jobs
from distdl.tools.editor import arguments, options
from distdl.tools.editor.algebra import (
    WRITTEN,
    WRITTEN_TEXT,
    Schema,
    closed_over,
    described,
    reference,
    switch,
    types,
)
from distdl.tools.editor.arguments import PART, Arguments, Known
from distdl.tools.editor.options import SELF, OptionFile, Options, targets_in
from distdl.tools.editor.shapes import NodeShape, fields, of_class, of_node, union

DIALECT = "http://json-schema.org/draft-07/schema#"
CONFIG, EXPERIMENT = "config", "experiment"
FIXED: Mapping[str, type[BaseModel]] = {
    "project": Project,
    "checkpoint": Checkpoint,
    "watchdog": WatchdogSettings,
    "program": Program,
}
_DOTTED = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"
# Hydra's own keys of a node.
_HYDRAS = r"^_(target|partial|recursive|convert|args)_$"
# A file of the group `tune`: `optimizer.lr: interval(0.01, 1)`, or `optimizer: {lr: [0.1, 0.2]}`.
# `distdl schema tune` is another schema, of what that command answers.
SPACES, SPACES_GROUP, _SPACE = "spaces", "tune", "space"
_LINES: Schema = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": reference(_SPACE),
}
_NAMES_TARGET: Schema = {"type": "object", "required": ["_target_"]}
_NODE: Schema = {"type": ["object", "string", "null"], "pattern": WRITTEN}
# Keys of a whole config, written into a file of a group with `# @package _global_`.
_GLOBAL = (*COMPONENTS, *COLLECTIONS, "trainer", "checkpoint", "project", "program")


def read() -> Schemas:
    """Reads the options, and what their classes take, as this user may import them."""
    found = options.read()
    trust = jobs.project_trust()
    targets = {target for option in found.all() for target in targets_in(option.content)}
    return Schemas(found, arguments.read(targets, trust))


@dataclass(frozen=True)
class Schemas:
    """The schemas of all config files.

    Args:
        options: All groups.
        known: What classes take.
    """

    options: Options
    known: Known

    @cached_property
    def sections(self) -> list[str]:
        """The groups whose options are a section of the config, in alphabetical order."""
        groups = {*COMPONENTS, *COLLECTIONS, "trainer"}
        return sorted(groups)

    @property
    def names(self) -> list[str]:
        """Of all documents."""
        return [CONFIG, EXPERIMENT, PART, SPACES, *self.sections]

    @property
    def unread(self) -> dict[str, str]:
        """Classes whose arguments are not known, so that any are accepted, and files of options
        that could not be read; and why."""
        read = self.known.arguments.items()
        files = {os.path.relpath(file): "it is no YAML" for file in self.options.unreadable}
        return files | {target: each.unread for target, each in read if each.unread}

    def document(self, name: str, *, beside: bool = False) -> Schema:
        """A JSON Schema: `config`, `experiment`, `part`, or the name of a group.

        Args:
            beside: Whether experiment.json lies beside it, which it then names. Otherwise it is
                complete by itself.
        """
        titles = {
            CONFIG: "a whole config",
            EXPERIMENT: "an experiment, or another file with # @package _global_",
            PART: "a node inside a component",
            SPACES: "what a search varies: key: values",
        }
        title = titles.get(name, f"an option of the group {name}")
        whole = [reference(f"file.{name}")]
        document = {"$schema": DIALECT, "title": f"distdl: {title}", "allOf": whole}
        definitions = self.definitions
        if beside and name != EXPERIMENT:
            definitions = {**definitions, f"file.{EXPERIMENT}": {"$ref": f"{EXPERIMENT}.json"}}
        return closed_over(document, definitions)

    @cached_property
    def definitions(self) -> dict[str, Schema]:
        found: dict[str, Schema] = {"any": self._any(), "part": self._switch(PART)}
        for target in self._targets(PART):
            found[f"part.{target}"] = self._object(of_class(self._arguments(target), PART))
        for group in (EXPERIMENT, *self.sections):
            found[f"defaults.{group}"] = self._defaults(group)
        for group in self.options.by_group:
            found[f"choice.{group.replace('/', '.')}"] = self._choice(group)
        for section in COMPONENTS:
            found |= self._of_component(section)
        for section in COLLECTIONS:
            found |= self._of_collection(section)
        found["trainer"] = self._trainer()
        found["file.trainer"] = self._file(found["trainer"], {})
        found[f"file.{EXPERIMENT}"] = self._experiment()
        found[f"file.{CONFIG}"] = self._config()
        found[f"file.{PART}"] = reference("any")
        found[f"file.{SPACES}"] = _LINES
        found[_SPACE] = {
            "anyOf": [
                {"type": ["string", "number", "boolean"]},
                {"type": "array", "minItems": 2},
                {"type": "object", "additionalProperties": reference(_SPACE)},
            ]
        }
        return found

    # ------------------------------------------------------------ classes and nodes

    def _arguments(self, target: str) -> Arguments:
        return self.known.arguments.get(target, Arguments())

    def _targets(self, section: str) -> list[str]:
        """The targets of a section whose arguments are known: what options and experiments name,
        and what there is besides."""
        if section == PART:
            all_named = {t for option in self.options.all() for t in targets_in(option.content)}
            own = {target for each in (*COMPONENTS, *COLLECTIONS) for target in self._targets(each)}
            return sorted(all_named - own)
        named = {str(node["_target_"]) for node in self._nodes(section) if "_target_" in node}
        return sorted({*named, *self.known.homes.get(section, ())})

    def _nodes(self, section: str) -> Iterator[dict[str, Any]]:
        """The nodes of a section in all files, as far as the option and those of its group say."""
        for _, content, _ in self._contents(section):
            inner = content.values() if section in COLLECTIONS else [content]
            yield from (node for node in inner if isinstance(node, dict))

    def _contents(self, section: str) -> Iterator[tuple[OptionFile, dict[str, Any], str]]:
        """What each file says of a section, and the path of that in the file."""
        for option, merged in self._merged:
            if option.package == section:
                yield option, merged, ""
            elif option.package == "_global_" and isinstance(merged.get(section), dict):
                yield option, merged[section], section

    @cached_property
    def _merged(self) -> list[tuple[OptionFile, dict[str, Any]]]:
        return [(option, self.options.merged(option)) for option in self.options.all()]

    def _shape(
        self, option: OptionFile, content: Mapping[str, Any], section: str, path: str
    ) -> NodeShape:
        about = self.options.comments(option)
        return of_node(content, section, self.known.arguments, about, path)

    def _object(self, shape: NodeShape) -> Schema:
        """A mapping of a shape."""
        properties = {name: self._value(each) for name, each in shape.keys.items()}
        return {
            "properties": properties,
            "patternProperties": {_HYDRAS: {}},  # which `_switch` looks at
            "additionalProperties": reference("any") if shape.more else False,
        }

    def _value(self, value: Schema | NodeShape) -> Schema:
        """A value of an argument, inside which each node has the arguments of its class."""
        if isinstance(value, NodeShape):
            inside = {
                "if": _NAMES_TARGET,
                "then": reference("any"),
                "else": {"if": {"type": "object"}, "then": self._object(value)},
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

    def _any(self) -> Schema:
        """Any value, inside which each node has the arguments of its class."""
        return {
            "if": _NAMES_TARGET,
            "then": reference("part"),
            "else": {"additionalProperties": reference("any"), "items": reference("any")},
        }

    def _switch(self, section: str) -> Schema:
        """A node that names its class."""
        targets = self._targets(section)
        cases = [
            (_names(target), reference(f"{section}.{target}"))
            for target in targets
            if not self._arguments(target).unread
        ]
        hydras = {**fields(Component), "_target_": self._target(section, targets)}
        return {"properties": hydras, **switch(cases)}

    def _target(self, section: str, targets: Sequence[str]) -> Schema:
        """A `_target_`: one that is known, or one of which nothing is known here."""
        homes = arguments.HOMES.get(section, ())
        known = sorted({*targets, *self.known.homes.get(section, ())})
        other: Schema = {"type": "string", "pattern": _DOTTED}
        if homes and self.known.homes:
            inside = "|".join(map(re.escape, homes))
            other["not"] = {"pattern": rf"^({inside})\.\w+$"}
        return {"anyOf": [{"enum": known}, other, WRITTEN_TEXT]}

    # ------------------------------------------------------------ sections

    def _of_component(self, section: str) -> dict[str, Schema]:
        """The definitions of a section that is one node."""
        found = {f"{section}.classes": self._switch(section)}
        for target in self._targets(section):
            shape = self._shape_of_target(section, target)
            found[f"{section}.{target}"] = self._object(self._with_defaults(shape, section))
        shapes = [
            self._chosen_or_not(option, content, section, path)
            for option, content, path in self._contents(section)
            if "_target_" in content
        ]
        whole = self._with_defaults(union(shapes), section)
        found[section] = self._node(section, whole)
        choices = self.options.by_group.get(section, {})
        for name, option in choices.items():
            content = self.options.merged(option)
            chosen = whole
            if "_target_" in content:
                shape = self._shape(option, content, section, "")
                chosen = self._with_defaults(shape, section)
            found[f"{section}={name}"] = self._node(section, chosen)
        known: Schema = {"contains": {"enum": [*choices]}}
        by_defaults = {
            "if": {"required": ["defaults"], "properties": {"defaults": known}},
            "then": switch(
                [(_builds_on(name, choices), reference(f"{section}={name}")) for name in choices]
            ),
            "else": reference(section),
        }
        found[f"file.{section}"] = self._file(by_defaults, whole.keys)
        return found

    def _chosen_or_not(
        self, option: OptionFile, content: Mapping[str, Any], section: str, path: str
    ) -> NodeShape:
        """What an option adds to the keys of a section of which the choice is not known. The
        package of an option of distdl's may be missing here: it must not open the section."""
        shape = self._shape(option, content, section, path)
        unread = self._arguments(str(content["_target_"])).unread
        return replace(shape, more=False) if unread and not option.own else shape

    def _shape_of_target(self, section: str, target: str) -> NodeShape:
        """What a node of a class may hold, also in nodes of other classes inside it."""
        shapes = [
            self._shape(option, content, section, path)
            for option, content, path in self._contents(section)
            if content.get("_target_") == target
        ]
        return union(shapes) if shapes else of_class(self._arguments(target), section)

    def _with_defaults(self, shape: NodeShape, section: str) -> NodeShape:
        """A file has a defaults list beside the keys of its section."""
        return NodeShape({**shape.keys, "defaults": reference(f"defaults.{section}")}, shape.more)

    def _node(self, section: str, otherwise: NodeShape) -> Schema:
        """A section, or a node of a collection: its class is named, or was chosen elsewhere."""
        return {
            **_NODE,
            "if": _NAMES_TARGET,
            "then": reference(f"{section}.classes"),
            "else": self._object(otherwise),
        }

    def _of_collection(self, section: str) -> dict[str, Schema]:
        """The definitions of a section with nodes by names of the user's."""
        found = {f"{section}.classes": self._switch(section)}
        for target in self._targets(section):
            found[f"{section}.{target}"] = self._object(of_class(self._arguments(target), section))
        by_name: dict[str, list[NodeShape]] = {}
        for option, content, path in self._contents(section):
            for name, node in content.items():
                if isinstance(node, dict) and "_target_" in node:
                    inner = f"{path}.{name}".removeprefix(".")
                    shape = self._shape(option, node, section, inner)
                    by_name.setdefault(name, []).append(shape)
        properties = {name: self._node(section, union(each)) for name, each in by_name.items()}
        classes = {"allOf": [reference(f"{section}.classes")]}
        unknown = {**_NODE, "required": ["_target_"], **classes}
        found[section] = {**_NODE, "properties": properties, "additionalProperties": unknown}
        with_defaults = {**properties, "defaults": reference(f"defaults.{section}")}
        whole = {**found[section], "properties": with_defaults}
        found[f"file.{section}"] = self._file(whole, by_name)
        return found

    def _trainer(self) -> Schema:
        signature = self._arguments(arguments.TRAINER)
        given = {name: each for name, each in signature.keys.items() if name not in TRAINER_OWNED}
        about: dict[str, str] = {}
        for option in self.options.by_group.get("trainer", {}).values():
            about |= self.options.comments(option)
        keys = {
            name: described(each, about.get(name, ""))
            for name, each in {**given, **fields(TrainerArguments)}.items()
        }
        shape = NodeShape({**keys, "defaults": reference("defaults.trainer")}, signature.more)
        return {**_NODE, **self._object(shape), "patternProperties": {}}

    # ------------------------------------------------------------ files

    def _file(self, content: Schema, own: Collection[str]) -> Schema:
        """A file of a group: its section, or with `# @package _global_` a part of a whole config,
        which is known by the names of sections that the section itself has not (`own`)."""
        elsewhere = [name for name in _GLOBAL if name not in own]
        return {
            "type": ["object", "null"],
            "if": {
                "not": {"required": ["_target_"]},
                "anyOf": [{"required": [name]} for name in elsewhere],
            },
            "then": reference(f"file.{EXPERIMENT}"),
            "else": content,
        }

    def _experiment(self) -> Schema:
        """A file with a part of a whole config. What a section may hold depends on the option that
        the defaults list chooses; without one, it may be any."""
        cases = list[tuple[Schema, Schema]]()
        for section in COMPONENTS:
            names = [*self.options.by_group.get(section, {})]
            key = f"override /{section}"
            for name in names:
                holds = {"properties": {section: reference(f"{section}={name}")}}
                cases.append((_chooses(key, {"const": name}), holds))
            none: Schema = {"not": _chooses(key, {"enum": names})}
            cases.append((none, {"properties": {section: reference(section)}}))
        return {**self._global(reference(f"defaults.{EXPERIMENT}")), **switch(cases)}

    def _config(self) -> Schema:
        """What `--cfg job` prints, and what a run keeps as its config.yaml."""
        whole = self._global({"type": "array"})
        for section in COMPONENTS:
            whole["properties"][section] = reference(section)
        return {**whole, "required": ["name", "experiment_name", "tags", "project"]}

    def _global(self, defaults: Schema) -> Schema:
        about = options.primary_comments()
        properties: dict[str, Schema] = {"defaults": defaults, "hydra": {"type": "object"}}
        scalars = {**fields(ProgramConfig), **fields(Config)}
        for name in {**ProgramConfig.model_fields, **Config.model_fields}:
            if name in FIXED:
                properties[name] = _fixed(name, about)
            elif name in (*COLLECTIONS, "trainer"):
                properties[name] = reference(name)
            elif name in COMPONENTS:
                properties[name] = {**_NODE, "not": {"type": "object", "required": ["defaults"]}}
            else:
                properties[name] = described(scalars[name], about.get(name, ""))
        return {
            "type": ["object", "null"],
            "properties": properties,
            "additionalProperties": False,
        }

    def _defaults(self, group: str) -> Schema:
        """A defaults list: options of the same group, and choices of other groups."""
        same = LAYERS if group == EXPERIMENT else (group,)
        siblings = [name for each in same for name in self.options.by_group.get(each, {})]
        properties: dict[str, Schema] = {}
        for name in self.options.by_group:
            for key in (f"override /{name}", f"/{name}"):
                properties[key] = reference(f"choice.{name.replace('/', '.')}")
            if name.startswith(f"{group}/"):
                properties[name.removeprefix(f"{group}/")] = properties[f"/{name}"]
        entry = {
            "type": "object",
            "properties": properties,
            # Another package, Hydra's own groups, and options that may be absent.
            "patternProperties": {"@": {}, "hydra": {}, "^optional ": {}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        }
        # A name with a slash leads to another group, or into a folder.
        text = {"type": "string", "pattern": r"/|\$"}
        items = {"anyOf": [{"enum": [SELF, *siblings]}, text, entry]}
        return {"type": ["array", "null"], "items": items}

    def _choice(self, group: str) -> Schema:
        """One option of a group, several, or none."""
        names: list[object] = [*self.options.by_group[group]]
        names += [int(name) for name in self.options.by_group[group] if name.isdecimal()]
        text = {"type": "string", "pattern": r"/|\$"}
        several = {"type": "array", "items": {"anyOf": [{"enum": names}, text]}}
        return {"anyOf": [{"enum": [*names, None]}, several, text]}


def _names(target: str) -> Schema:
    """Whether a node names this class."""
    return {"required": ["_target_"], "properties": {"_target_": {"const": target}}}


def _builds_on(name: str, names: Iterable[str]) -> Schema:
    """Whether a file of a group builds on this option of it, and on no other one."""
    others = {"contains": {"enum": [each for each in names if each != name]}}
    alone = {"allOf": [{"contains": {"const": name}}, {"not": others}]}
    return {"required": ["defaults"], "properties": {"defaults": alone}}


def _chooses(key: str, option: Schema) -> Schema:
    """Whether a defaults list has an entry with this key and such an option."""
    entry = {"type": "object", "required": [key], "properties": {key: option}}
    return {"required": ["defaults"], "properties": {"defaults": {"contains": entry}}}


def _fixed(name: str, about: Mapping[str, str]) -> Schema:
    """A section whose keys are fixed."""
    keys = fields(FIXED[name])
    return {
        "type": ["object", "string"],
        "pattern": WRITTEN,
        "properties": {
            key: described(each, about.get(f"{name}.{key}", "")) for key, each in keys.items()
        },
        "additionalProperties": False,
    }
