"""Which classes and functions a config may name by `_target_`, decided without importing any.

A config travels (mail, a shared folder, MLflow) and `_target_` calls what it names, so only names
under known packages are accepted, as Hydra's advisory GHSA-37p2-j732-x8pj advises. The second
stage checks again what a name really leads to, since `torch.os.system` is a name, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any

from distdl.errors import Problem
from distdl.schema import Path, path_text

ALLOWED = ("distdl", "torch", "torchvision", "lightning", "pytorch_lightning", "timm")
# Single names outside those packages that many configs need and that can do no harm.
HARMLESS = ("datetime.timedelta",)
# Inside allowed packages, yet they run what a file or a repository says.
DENIED = (
    "torch.load",
    "torch.serialization",
    "torch.hub",
    "torch.package",
    "torch.utils.cpp_extension",
    "torch.utils.model_zoo",
    "torch.multiprocessing",
    "timm.models.load_checkpoint",
)
# Modules that packages import and thereby offer as attributes: `torch.hub.os.system`.
_LEADS_OUT = {
    "os", "sys", "posix", "nt", "subprocess", "shutil", "builtins", "importlib", "runpy", "pickle",
    "socket", "ctypes", "pty", "code", "codecs", "inspect", "tempfile", "platform",
}  # fmt: skip
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def nodes(values: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every mapping with a `_target_`, at any depth, also inside lists, outermost first."""
    if isinstance(values, dict):
        if "_target_" in values:
            yield path, values
        for key, value in values.items():
            yield from nodes(value, (*path, str(key)))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from nodes(value, (*path, index))


def under(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a dotted name is one of `prefixes` or lies below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def lies_in(target: str, folders: Sequence[str]) -> bool:
    """Whether a dotted name is that of a module or package in one of the folders.

    A name of the standard library is never the user's: Python has already imported its own.
    """
    package, inner = target.split(".")[:2]
    if package in sys.stdlib_module_names:
        return False
    for place in (FilePath(folder) / package for folder in folders):
        inside = ("__init__.py", f"{inner}.py", f"{inner}/__init__.py")
        if place.with_suffix(".py").is_file() or any((place / name).is_file() for name in inside):
            return True
    return False


def problem_of(target: Any, allow: Sequence[str], folders: Sequence[str]) -> tuple[str, str] | None:
    """Why a `_target_` is refused and the remedy, or None if it may be imported.

    Args:
        target: The value of `_target_`.
        allow: Further allowed prefixes, from `project.allow`.
        folders: Folders of the user's own code.
    """
    if not isinstance(target, str) or not _DOTTED.fullmatch(target):
        return f"is no dotted path of a class or function: {target!r}", "write package.module.Class"
    package, *inner = target.split(".")
    if under(target, allow) or target in HARMLESS:
        return None
    if any(part.startswith("__") for part in inner) or _LEADS_OUT & set(inner):
        return f"{target} leads out of the package {package}", ""
    if under(target, DENIED):
        return f"{target} may run foreign code", f"if you trust it: project.allow=[{target}]"
    if package in ALLOWED or lies_in(target, folders):
        return None
    what = f"{target} is outside the allowed packages ({', '.join(ALLOWED)}, your project's)"
    if package in sys.stdlib_module_names:
        return what, ""  # hardly ever meant, and never advised
    return what, f"if you trust it: project.allow=[{package}]"


def target_problems(
    values: dict[str, Any], allow: Sequence[str], folders: Sequence[str]
) -> list[tuple[Path, Problem]]:
    """The refused `_target_`s of a whole config."""
    problems = []
    for path, node in nodes(values):
        if found := problem_of(node["_target_"], allow, folders):
            place = (*path, "_target_")
            problems.append((place, Problem(path_text(place), *found)))
    return problems
