"""JSON Schemas of config files: of each group's options, of experiments, of a whole config.

Files hold a part of a config, so nothing is required, any value may be `${...}`, and what a section
may hold depends on the class that the file names, or on the option that its defaults list chooses.
The dialect is draft 7, which editors know best.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

from distdl.config.schema import COLLECTIONS, COMPONENTS
from distdl.launch import jobs
from distdl.tools.editor import arguments, config_schemas, options
from distdl.tools.editor.algebra import Schema, closed_over, reference
from distdl.tools.editor.arguments import PART, Known
from distdl.tools.editor.named_classes import NamedClasses
from distdl.tools.editor.node_schemas import NodeSchemas
from distdl.tools.editor.options import Options, targets_in
from distdl.tools.editor.section_schemas import EXPERIMENT, SectionSchemas
from distdl.tools.editor.shapes import of_class

DIALECT = "http://json-schema.org/draft-07/schema#"
CONFIG = "config"
# A file of the group `tune`: `optimizer.lr: interval(0.01, 1)`, or `optimizer: {lr: [0.1, 0.2]}`.
# `distdl schema tune` is another schema, of what that command answers.
SPACES, SPACES_GROUP, _SPACE = "spaces", "tune", "space"
_LINES: Schema = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": reference(_SPACE),
}


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
        classes = NamedClasses(self.options, self.known)
        nodes = NodeSchemas(classes)
        sections = SectionSchemas(classes)
        found: dict[str, Schema] = {"any": nodes.any_value(), "part": nodes.switch(PART)}
        for target in classes.targets(PART):
            found[f"part.{target}"] = nodes.mapping(of_class(classes.arguments(target), PART))
        for group in (EXPERIMENT, *self.sections):
            found[f"defaults.{group}"] = config_schemas.of_defaults(self.options, group)
        for group in self.options.by_group:
            name = f"choice.{group.replace('/', '.')}"
            found[name] = config_schemas.of_choice(self.options, group)
        for section in COMPONENTS:
            found |= sections.of_component(section)
        for section in COLLECTIONS:
            found |= sections.of_collection(section)
        found |= sections.of_trainer()
        found[f"file.{EXPERIMENT}"] = config_schemas.of_experiment(self.options)
        found[f"file.{CONFIG}"] = config_schemas.of_config()
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
