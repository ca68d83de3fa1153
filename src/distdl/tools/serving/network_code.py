"""What builds a network, as a package holds it: a node, and the Python files that it needs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import distdl
from distdl.config.own_code import is_installed
from distdl.tools.serving.model_folder import PACKAGE
from distdl.tools.serving.packaged import TARGET
from distdl.util.errors import UserError

SPECIAL = re.compile(r"_\w+_")  # keys by which Hydra builds in another way
REMEDY = "a network whose code needs no distdl, or --to weights"


@dataclass
class NetworkCode:
    """`files`: the user's own, by their path in the package. `packages`: to be installed."""

    files: dict[str, Path] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)


def packed_node(node: object, copied: Sequence[str]) -> object:
    """A node as a package's own code builds it: what is in distdl's files `copied` has the name
    that it has there.

    Raises:
        UserError: It is built by other code of distdl, or as only Hydra does.
    """
    if isinstance(node, list):
        return [packed_node(each, copied) for each in node]
    if not isinstance(node, Mapping):
        return node
    if special := [key for key in node if SPECIAL.fullmatch(str(key)) and key != TARGET]:
        raise UserError.at(
            "model.network",
            what=f"its node has {special[0]}, by which only Hydra builds a network",
            remedy="--to weights",
            code="unsupported",
        )
    packed = {key: packed_node(value, copied) for key, value in node.items()}
    target = str(node.get(TARGET, ""))
    if target.partition(".")[0] == "distdl":
        module, _, name = target.rpartition(".")
        made = getattr(importlib.import_module(module), name)
        path = Path(sys.modules[made.__module__].__file__ or "")
        folder = Path(distdl.__file__).parent
        if path.relative_to(folder).as_posix() not in copied:
            raise UserError.at(
                "model.network",
                what=f"{target} is code of distdl, of which a package holds no copy",
                remedy=REMEDY,
                code="unsupported",
            )
        packed[TARGET] = f"{PACKAGE}.{path.stem}.{made.__qualname__}"
    return packed


def code_of(node: object, copied: Sequence[str]) -> NetworkCode:
    """The code that the targets of a node need, and what that code imports in turn. Executes
    nothing.

    Args:
        node: As in the config.
        copied: distdl's files that the package holds copies of; they too import packages.
    """
    code = NetworkCode()
    known = metadata.packages_distributions()
    folder = Path(distdl.__file__).parent
    names = [target.partition(".")[0] for target in targets(node)]
    for name in copied:
        names += imported(folder / name)
    seen = set[str]()
    while names:
        name = names.pop()
        if name in seen or name in sys.stdlib_module_names or name in ("distdl", PACKAGE):
            continue
        seen.add(name)
        spec = None
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
        if spec is None:
            continue  # perhaps only tried; if not, the package does not run, and is refused
        files = {path: at for path, at in files_of(spec) if not is_installed(at)}
        code.files |= files
        for at in files.values():
            names += imported(at)
        if not files:
            code.packages |= {*known.get(name, ())}
    return code


def targets(node: object) -> Iterator[str]:
    """Every `_target_` in a node."""
    if isinstance(node, list):
        for each in node:
            yield from targets(each)
    elif isinstance(node, Mapping):
        if TARGET in node:
            yield str(node[TARGET])
        for each in node.values():
            yield from targets(each)


def files_of(spec: importlib.machinery.ModuleSpec) -> Iterator[tuple[str, Path]]:
    """The Python files of a module or package, with their paths as an import finds them."""
    if spec.submodule_search_locations is None:
        if spec.origin and spec.origin.endswith(".py"):
            yield f"{spec.name}.py", Path(spec.origin)
        return
    for place in spec.submodule_search_locations:
        for path in sorted(Path(place).rglob("*.py")):
            yield f"{spec.name}/{path.relative_to(place).as_posix()}", path


def imported(file: Path) -> list[str]:
    """The packages that a file imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(str(node.module))
    return [name.partition(".")[0] for name in names]
