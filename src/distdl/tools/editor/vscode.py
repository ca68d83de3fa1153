"""Writes the schemas of config files for an editor, and tells VS Code which file has which one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distdl.config import user_conf
from distdl.config.recipe import LAYERS
from distdl.tools.editor.arguments import PART
from distdl.tools.editor.options import OptionFile
from distdl.tools.editor.schemas import CONFIG, SPACES, SPACES_GROUP, Schemas
from distdl.tools.editor.section_schemas import EXPERIMENT
from distdl.util.atomic_files import write_bytes
from distdl.util.errors import UserError

KEY = "yaml.schemas"
# Hydra reads 200_000 as a number, and yes as true, as YAML 1.1 has it.
VERSION = "yaml.yamlVersion"
FOLDER = "schemas"
MARK = "written by: python -m distdl schema --write"


@dataclass(frozen=True)
class Written:
    """What was written.

    Args:
        schemas: The files, by the name of the schema.
        settings: The file of settings.
        mapping: What its key `yaml.schemas` needs.
    """

    schemas: Mapping[str, Path]
    settings: Path
    mapping: Mapping[str, list[str]]


def write(schemas: Schemas, folder: Path) -> Written:
    """Writes each schema as `schemas/NAME.json` below a folder, and into its settings.json which
    config files have which schema. All other settings stay.

    Raises:
        UserError: A file is there that is not of this command, or the settings cannot be changed
            without a loss: they hold comments.
    """
    paths = {name: folder / FOLDER / f"{name}.json" for name in schemas.names}
    for path in paths.values():
        _refuse_another(path)
    settings = folder / "settings.json"
    mapping = {_seen_from_here(paths[name]): globs for name, globs in files_of(schemas).items()}
    changed = _changed(settings, mapping, _seen_from_here(folder / FOLDER))
    for name, path in paths.items():
        document = {"$comment": MARK, **schemas.document(name, beside=True)}
        write_bytes(path, f"{json.dumps(document)}\n".encode(), durable=False)
    write_bytes(settings, changed.encode(), durable=False)
    return Written(paths, settings, mapping)


def files_of(schemas: Schemas) -> dict[str, list[str]]:
    """Which files each schema is for, as patterns from the current folder."""
    folder = user_conf.folder()
    top = Path(os.path.relpath(folder)).as_posix() if folder else "conf"
    globs = {EXPERIMENT: [f"{top}/{layer}/**/*.yaml" for layer in LAYERS]}
    globs |= {section: [f"{top}/{section}/*.yaml"] for section in schemas.sections}
    globs[CONFIG] = ["outputs/**/config.yaml"]
    globs[SPACES] = [f"{top}/{SPACES_GROUP}/*.yaml"]
    globs[PART] = []
    for option in schemas.options.all():
        name = _of_own_group(option, schemas)
        if name:
            globs[name].append(f"{top}/{option.group}/{option.name}.yaml")
    return {name: patterns for name, patterns in globs.items() if patterns}


def _of_own_group(option: OptionFile, schemas: Schemas) -> str:
    """The schema of a file in a group that distdl has not; empty if it needs none of its own."""
    first = option.group.partition("/")[0]
    if not option.own or first in LAYERS or option.group in schemas.sections:
        return ""
    if option.package == "_global_":
        return EXPERIMENT
    if option.package in schemas.sections:
        return option.package
    return PART if option.package.partition(".")[0] in schemas.sections else ""


def _seen_from_here(path: Path) -> str:
    """A path as VS Code takes it: from the folder that is open."""
    relative = Path(os.path.relpath(path)).as_posix()
    return relative if relative.startswith("../") else f"./{relative}"


def _refuse_another(path: Path) -> None:
    if not path.exists():
        return
    try:
        mine = json.loads(path.read_bytes()).get("$comment") == MARK
    except (OSError, ValueError, AttributeError):
        mine = False
    if not mine:
        raise UserError.at(
            str(path),
            what="is there already, and is no schema that this command wrote",
            remedy="move it, or name another folder",
            code="exists-already",
        )


def _changed(settings: Path, mapping: Mapping[str, list[str]], ours: str) -> str:
    """The settings with this mapping. Entries of others, and all other settings, stay."""
    try:
        text = settings.read_text(encoding="utf-8") if settings.exists() else "{}"
        found: Any = json.loads(text)
    except (OSError, ValueError) as error:
        lines = json.dumps({KEY: mapping}, indent=2)
        raise UserError.at(
            str(settings),
            what=f"cannot be changed without a loss, since it is no plain JSON: {error}",
            remedy=(
                f"take the comments out of it, or name another folder and write into it:\n{lines}"
            ),
            code="unreadable",
        ) from error
    entries = found.get(KEY, {}) if isinstance(found, dict) else None
    if not isinstance(entries, dict):
        raise UserError.at(
            str(settings),
            what=f"is no mapping, or its {KEY} is none",
            remedy="correct it",
            code="wrong-type",
        )
    others = {name: globs for name, globs in entries.items() if not name.startswith(f"{ours}/")}
    found[KEY] = {**others, **mapping}
    found.setdefault(VERSION, "1.1")
    return f"{json.dumps(found, indent=2, ensure_ascii=False)}\n"
