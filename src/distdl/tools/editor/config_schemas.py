"""JSON Schemas of a whole config, of files with a part of one, and of what they choose.

What a section may hold is in `section_schemas.py`; here it is only referred to.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from distdl.config.recipe import LAYERS
from distdl.config.schema import (
    COLLECTIONS,
    COMPONENTS,
    Checkpoint,
    Config,
    Program,
    ProgramConfig,
    Project,
    WatchdogSettings,
)
from distdl.tools.editor.algebra import WRITTEN, Schema, described, reference, switch
from distdl.tools.editor.node_schemas import NODE
from distdl.tools.editor.options import SELF, Options, primary_comments
from distdl.tools.editor.section_schemas import EXPERIMENT
from distdl.tools.editor.shapes import fields

FIXED: Mapping[str, type[BaseModel]] = {
    "project": Project,
    "checkpoint": Checkpoint,
    "watchdog": WatchdogSettings,
    "program": Program,
}


def of_experiment(options: Options) -> Schema:
    """A file with a part of a whole config. What a section may hold depends on the option that
    the defaults list chooses; without one, it may be any."""
    cases = list[tuple[Schema, Schema]]()
    for section in COMPONENTS:
        names = [*options.by_group.get(section, {})]
        key = f"override /{section}"
        for name in names:
            holds = {"properties": {section: reference(f"{section}={name}")}}
            cases.append((_chooses(key, {"const": name}), holds))
        none: Schema = {"not": _chooses(key, {"enum": names})}
        cases.append((none, {"properties": {section: reference(section)}}))
    return {**_global(reference(f"defaults.{EXPERIMENT}")), **switch(cases)}


def of_config() -> Schema:
    """What `--cfg job` prints, and what a run keeps as its config.yaml."""
    whole = _global({"type": "array"})
    for section in COMPONENTS:
        whole["properties"][section] = reference(section)
    return {**whole, "required": ["name", "experiment_name", "tags", "project"]}


def of_defaults(options: Options, group: str) -> Schema:
    """A defaults list: options of the same group, and choices of other groups."""
    same = LAYERS if group == EXPERIMENT else (group,)
    siblings = [name for each in same for name in options.by_group.get(each, {})]
    properties: dict[str, Schema] = {}
    for name in options.by_group:
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


def of_choice(options: Options, group: str) -> Schema:
    """One option of a group, several, or none."""
    names: list[object] = [*options.by_group[group]]
    names += [int(name) for name in options.by_group[group] if name.isdecimal()]
    text = {"type": "string", "pattern": r"/|\$"}
    several = {"type": "array", "items": {"anyOf": [{"enum": names}, text]}}
    return {"anyOf": [{"enum": [*names, None]}, several, text]}


def _global(defaults: Schema) -> Schema:
    about = primary_comments()
    properties: dict[str, Schema] = {"defaults": defaults, "hydra": {"type": "object"}}
    scalars = {**fields(ProgramConfig), **fields(Config)}
    for name in {**ProgramConfig.model_fields, **Config.model_fields}:
        if name in FIXED:
            properties[name] = _fixed(name, about)
        elif name in (*COLLECTIONS, "trainer"):
            properties[name] = reference(name)
        elif name in COMPONENTS:
            properties[name] = {**NODE, "not": {"type": "object", "required": ["defaults"]}}
        else:
            properties[name] = described(scalars[name], about.get(name, ""))
    return {
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": False,
    }


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
