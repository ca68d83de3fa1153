"""Writes a new project, which trains and passes its tests as it is."""

from __future__ import annotations

import contextlib
import importlib.util
import keyword
import os
import re
import shutil
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

from jinja2 import Environment, StrictUndefined

from distdl.tools.editor import schemas, vscode
from distdl.tools.project import draw
from distdl.util.errors import UserError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_EVERYWHERE = {
    ".dockerignore": "dockerignore",
    ".github/workflows/ci.yaml": "ci.yaml",
    ".gitignore": "gitignore",
    ".vscode/launch.json": "launch.json",
    "Dockerfile": "Dockerfile",
    "README.md": "README.md",
    "pyproject.toml": "pyproject.toml",
    "tests/test_project.py": "test_project.py",
    "conf/experiment/first.yaml": "first.yaml",
    "PACKAGE/__init__.py": "__init__.py",
}
# What a project of each task has besides: where, and from which template.
_OF_TASK: Mapping[str, Mapping[str, str]] = {
    "classify": {
        "conf/model/small.yaml": "classify_model.yaml",
        "conf/data/shapes.yaml": "classify_data.yaml",
        "PACKAGE/network.py": "classify_network.py",
    },
    "detect": {
        "conf/model/small.yaml": "detect_model.yaml",
        "conf/data/shapes.yaml": "detect_data.yaml",
        "PACKAGE/network.py": "detect_network.py",
    },
    "own": {
        "conf/model/line.yaml": "own_model.yaml",
        "conf/data/points.yaml": "own_data.yaml",
        "PACKAGE/model.py": "own_model.py",
        "PACKAGE/data.py": "own_data.py",
    },
}
TASKS = (*_OF_TASK,)
DRAWN = "data/shapes"


@dataclass(frozen=True)
class NewProject:
    """A project that was written."""

    SCHEMA: ClassVar[str] = "project/1"

    folder: str
    """Where it is."""
    files: list[str]
    """Its files, from its folder."""
    next: list[str]
    """What to type."""


def make(folder: Path, task: str) -> NewProject:
    """Writes a project into a folder that is not there, or is empty.

    Raises:
        UserError: The folder has files, or its name cannot be that of a package.
    """
    package = package_of(folder)
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise UserError.at(str(folder), what=f"there is no folder {parent}", code="not-found")
    _refuse_files_in(folder)
    written = content(folder.name, package, task)
    part = parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        for name, data in written.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_bytes(data)
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()  # an empty one
        part.rename(folder)
    except OSError as error:
        raise UserError.at(
            str(folder), what=f"cannot be written: {error.strerror or error}", code="not-writable"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    with contextlib.chdir(folder):
        vscode.write(schemas.read(), Path(".vscode"))
    made = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    typed = [f"cd {folder}", "distdl experiment=first", "pytest"]
    return NewProject(str(folder), made, typed)


def content(name: str, package: str, task: str) -> dict[str, bytes]:
    """The files of a project, by their path in it."""
    templates = files("distdl.tools.project") / "templates"
    # A template is text, not a page: it has no markup to escape.
    engine = Environment(
        keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    values = {"name": name, "package": package, "task": task}
    written = {}
    for path, template in {**_EVERYWHERE, **_OF_TASK[task]}.items():
        source = (templates / f"{template}.jinja").read_text(encoding="utf-8")
        text = engine.from_string(source).render(values)
        written[path.replace("PACKAGE", package)] = text.encode()
    drawn = {"classify": draw.classes, "detect": draw.objects}
    if task in drawn:
        written |= {f"{DRAWN}/{path}": data for path, data in drawn[task]().items()}
    return written


def package_of(folder: Path) -> str:
    """The name of a project's package.

    Raises:
        UserError: No package can have it, or another module has it.
    """
    name = folder.name
    package = name.lower().replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(package):
        raise UserError.at(
            str(folder),
            what=f"{name!r} cannot be the name of a package of Python",
            remedy="a letter, then letters, digits and underscores: distdl new project my_project",
            code="wrong-kind",
        )
    own = ("conf", "data", "outputs", "tests")
    found = package in own or package in sys.stdlib_module_names or _is_installed(package)
    if found:
        raise UserError.at(
            str(folder),
            what=f"{package} is the name of another module, which the project's would hide",
            remedy=f"distdl new project my_{package}",
            code="conflict",
        )
    return package


def _is_installed(package: str) -> bool:
    """Whether Python finds such a package, other than in the current folder."""
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec(package)
        return found is not None and found.origin is not None
    return False


def _refuse_files_in(folder: Path) -> None:
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir() or any(folder.iterdir()):
        raise UserError.at(
            str(folder),
            what="is there already, and nothing is overwritten",
            remedy="choose another name",
            code="exists-already",
        )
