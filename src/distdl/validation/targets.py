"""Which classes and functions a config may name by `_target_`, decided without importing any.

A config may come from somebody else (mail, a shared folder, MLflow), and the class or function that
`_target_` names is called. So there are two checks. This module checks the name: only members of
known packages may be imported at all. `validation.kinds` then checks the imported object: a
callback must be a Callback, an optimizer an Optimizer. A `Trust` says whose code is exempt.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from distdl.config.paths import path_text, walk
from distdl.config.schema import COLLECTIONS, COMPONENTS
from distdl.util.errors import Problem
from distdl.util.suggest import closest
from distdl.util.typed import Path

ALLOWED = (
    "distdl",
    "torch",
    "torchvision",
    "lightning",
    "pytorch_lightning",
    "timm",
    "schedulefree",
)
# Single names outside those packages that many configs need and that can do no harm.
HARMLESS = ("datetime.timedelta", "argparse.Namespace")
# Sections whose target the command line itself imports, and the package that it must be in.
WITHIN = {"launcher": "distdl.launchers", "task": "distdl.tasks"}
# The sections whose nodes are instantiated.
BUILT = (*COMPONENTS, *COLLECTIONS, "trainer")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


@dataclass(frozen=True)
class Trust:
    """Whose code may be imported without restriction."""

    folders: tuple[str, ...] = ()  # of the user's own code, in search order
    allow: tuple[str, ...] = ()  # dotted prefixes, from `project.allow`

    def covers(self, target: str) -> bool:
        """Whether a dotted name belongs to trusted code."""
        return under(target, self.allow) or lies_in(target, self.folders)


def nodes(values: object, key: str = "_target_") -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every mapping with a `_target_`, at any depth and inside lists too, outermost first."""
    return ((path, node) for path, node in walk(values) if isinstance(node, dict) and key in node)


def under(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a dotted name is one of `prefixes` or is below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def lies_in(target: str, folders: Sequence[str]) -> bool:
    """Whether a dotted name is in a module or package of one of the folders.

    Names of the standard library and of distdl never are: Python has imported these modules.
    """
    parts = target.split(".")
    if parts[0] in sys.stdlib_module_names or parts[0] == "distdl":
        return False
    names = ["/".join(parts[:end]) for end in range(1, len(parts))]
    return any(
        (FilePath(folder) / file).is_file()
        for folder in folders
        for name in names  # a package without an __init__.py is known by a module inside it
        for file in (f"{name}.py", f"{name}/__init__.py")
    )


def problem_of(target: object, trust: Trust, path: Path = ()) -> Problem | None:
    """Why the `_target_` of the node at `path` is refused; None if it may be imported."""
    location = path_text((*path, "_target_"))
    if not isinstance(target, str) or not _DOTTED.fullmatch(target):
        dotted = re.sub(r"(\.py)?[:/]+", ".", str(target)).strip(".")
        dotted = dotted if _DOTTED.fullmatch(dotted) else "package.module.Class"
        return Problem(
            location,
            what=f"is not a dotted path of a class or function: {target!r}",
            remedy=f"write {dotted}",
            code="wrong-kind",
        )
    if trust.covers(target) or target in HARMLESS:
        return None
    package, *inner = target.split(".")
    if package not in ALLOWED:
        # Of a launcher, a run's own file may name one that is there, but not trusted.
        searched = path[:1] != ("launcher",) and package not in sys.stdlib_module_names
        if searched and (missing := not_found(location, target, trust)):
            return missing
        what = f"{target} is outside the allowed packages ({', '.join(ALLOWED)}, your project's)"
        remedy = f"if you trust it: project.allow=[{package}]"
        if package in sys.stdlib_module_names:
            remedy = ""  # hardly ever intended, so never suggested
        return Problem(location, what=what, remedy=remedy, code="not-trusted")
    section = str(path[0]) if path else ""
    within = WITHIN.get(section)
    if any(part.startswith("_") for part in inner):
        return Problem(
            location,
            what=f"{target} is private to {package}",
            remedy=advice(target),
            code="not-trusted",
        )
    if within and not (len(path) == 1 and target.startswith(f"{within}.")):
        return Problem(
            location,
            what=f"{target} is not a {section} of distdl",
            remedy=advice(target),
            code="wrong-kind",
        )
    return None


def not_found(location: str, target: str, trust: Trust) -> Problem | None:
    """Where a module was looked for that is neither in the user's folders nor installed; None if it
    is there. `location` names it in the config. Imports nothing."""
    package, *inner = target.split(".")
    folders = [folder for folder in trust.folders if (FilePath(folder) / package).is_dir()]
    # Without a file of Python in it, a folder counts for `find_spec`, too.
    if not folders and importlib.util.find_spec(package) is not None:
        return None
    if folders:
        return Problem(
            location,
            what=f"{folders[0]}/{package} has no module {inner[0]!r}, which {target} names",
            remedy=f"write {folders[0]}/{package}/{inner[0]}.py, or correct the name",
            code="incomplete",
        )
    where = " and ".join(trust.folders) or "no folder"
    what = f"there is no module {package!r}, which {target} names, in {where}, nor is it installed"
    files = [file for folder in trust.folders for file in FilePath(folder).glob("*")]
    names = [file.stem for file in files if file.suffix == ".py" or any(file.glob("*.py"))]
    remedy = (
        "start distdl in the folder that holds it, or name that by project.root=; "
        f"if only the nodes have it, and you trust it: project.allow=[{package}]"
    )
    if near := closest(package, names):
        remedy = f"did you mean {'.'.join((near, *inner))}?"
    return Problem(location, what=what, remedy=remedy, code="incomplete")


def advice(target: str) -> str:
    return f"if you trust it: project.allow=[{target}]"


def target_problems(values: dict[str, Any], trust: Trust) -> list[tuple[Path, Problem]]:
    """The refused `_target_`s of a config, and strings that still hold an interpolation: Hydra
    would resolve them again, and might then find a `_target_`."""
    refused = []
    for path, node in nodes(values):
        if why := problem_of(node["_target_"], trust, path):
            refused.append(((*path, "_target_"), why))
    what = "still holds an interpolation after it was resolved:"
    for path, text in walk({key: values.get(key) for key in BUILT}):
        if isinstance(text, str) and "${" in text:
            wrong = Problem(path_text(path), what=f"{what} {text!r}", code="unreadable")
            refused.append((path, wrong))
    return refused
