"""What a task says about itself, read from its source: whether it trains, needs the built run, ...

Launching asks before anything is imported: torch takes seconds, and the user's own modules may
print, hang or crash. So a task says these things by literals in the body of its class
(`distdl.tasks.Task`), and they are read here without running anything. Later, validation imports
the class and compares (`validation.own_tasks`), so that a class that says them in another way is
refused and never misread.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from distdl.config.programs import is_program
from distdl.moved_names import current
from distdl.util.errors import UserError

# The base class of all tasks, whose own values hold for plain functions, too.
BASE = "distdl.worker.task.Task"


@dataclass(frozen=True)
class TaskFacts:
    """The attributes of `distdl.tasks.Task`, which describes each."""

    trains: bool
    evaluates: bool
    examines: bool
    needs_build: bool
    calls: tuple[str, ...]


PROGRAM = TaskFacts(trains=True, evaluates=False, examines=False, needs_build=False, calls=())
_NAME = ast.Name | ast.Attribute
NAMES = tuple(each.name for each in fields(TaskFacts))


def of(config: Mapping[Any, Any]) -> TaskFacts:
    """The facts of a config's task; those of a plain function if it names none. A program is
    what a training is to distdl: it is done once it succeeds, and a resume continues it."""
    if is_program(config):
        return PROGRAM
    node = config.get("task")
    return of_target(node.get("_target_") if isinstance(node, Mapping) else None)


def of_target(target: object) -> TaskFacts:
    """The facts of the task that a `_target_` names; those of a plain function if its source is not
    found or is no Python.

    Raises:
        UserError: distdl's own source is damaged.
    """
    base = next(_classes(BASE, set()), None)
    if base is None:
        raise UserError.at(
            "",
            what=f"the source of {BASE} is not found, or is no Python",
            remedy="install distdl again: it is damaged",
            code="unreadable",
        )
    values = _literals(base)
    for cls in reversed([*_classes(str(target), {BASE})]):
        values |= _literals(cls)
    return TaskFacts(**values)


def _literals(cls: ast.ClassDef) -> dict[str, Any]:
    """The facts that the body of a class assigns."""
    found = {}
    for statement in cls.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value:
            targets = [statement.target]
            value = statement.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and target.id in NAMES:
                try:
                    found[target.id] = ast.literal_eval(value)
                except ValueError:  # computed: validation refuses it if it is another value
                    continue
    return found


def _classes(name: str, seen: set[str]) -> Iterator[ast.ClassDef]:
    """The class that a dotted name names, then its bases, nearest first; without those in `seen`.
    Follows imports and other names of a class (`train = Train`)."""
    name = current(name)
    if name in seen:
        return
    seen.add(name)
    source, attribute = _home(name)
    if source is None:
        return
    if cls := source.classes.get(attribute):
        yield cls
        for base in cls.bases:
            # Task[Built] is Task.
            yield from _classes(
                source.meaning(base.value if isinstance(base, ast.Subscript) else base), seen
            )
    elif attribute in source.names:
        yield from _classes(source.names[attribute], seen)
    elif "." not in attribute:
        for module in source.all_of:
            if _source(module) is not None:
                yield from _classes(f"{module}.{attribute}", seen)


def _home(name: str) -> tuple[_Source | None, str]:
    """The module of a dotted name, and its name in there: `Outer.Inner` of a class in a class."""
    module, _, attribute = name.rpartition(".")
    while module:
        if source := _source(module):
            return source, attribute
        module, _, outer = module.rpartition(".")
        attribute = f"{outer}.{attribute}"
    return None, attribute


@dataclass
class _Source:
    """The classes of a module, and the dotted names behind its other names."""

    module: str
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    all_of: list[str] = field(default_factory=list)  # `from module import *`

    def add_class(self, cls: ast.ClassDef, outer: str = "") -> None:
        """A class, and those in its body."""
        self.classes[f"{outer}{cls.name}"] = cls
        for inner in cls.body:
            if isinstance(inner, ast.ClassDef):
                self.add_class(inner, f"{outer}{cls.name}.")

    def add_name(self, name: str, meaning: str, guarded: bool) -> None:
        """What a name stands for. Of several in `if` or `try` the first whose module is there."""
        known = self.names.get(name) if guarded else None
        if known is None or not (_file(known) or _file(known.rpartition(".")[0])):
            self.names[name] = meaning

    def meaning(self, expression: ast.expr) -> str:
        """The dotted name, from the top, that `Base` or `module.Base` stands for."""
        first, dot, rest = ast.unparse(expression).partition(".")
        return self.names.get(first, f"{self.module}.{first}") + dot + rest


def _source(module: str) -> _Source | None:
    """The source of a module; None if it has none that is Python."""
    try:
        file = _file(module)
        return _read(module, file, file.stat().st_mtime_ns) if file else None
    except (OSError, SyntaxError, ValueError):  # validation reports it, with its line
        return None


@functools.lru_cache(100)  # a start asks about ten times
def _read(module: str, file: Path, changed: int) -> _Source:
    """Reads the file of a module, as it was when it last `changed`."""
    tree = ast.parse(file.read_bytes())
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    source = _Source(module)
    for statement, guarded in _statements(tree.body):
        if isinstance(statement, ast.ClassDef):
            if not guarded or statement.name not in source.classes:
                source.add_class(statement)
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                meaning = alias.name if alias.asname else top
                source.add_name(alias.asname or top, meaning, guarded)
        elif isinstance(statement, ast.ImportFrom):
            home = _absolute(statement, package)
            for alias in statement.names:
                if alias.name == "*":
                    source.all_of.append(home)
                else:
                    source.add_name(alias.asname or alias.name, f"{home}.{alias.name}", guarded)
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, _NAME):
            for target in statement.targets:
                source.names[ast.unparse(target)] = source.meaning(statement.value)
    return source


def _statements(body: Sequence[ast.stmt], guarded: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """The statements of a module, and whether each is in an `if`, `try` or `with`."""
    for statement in body:
        yield statement, guarded
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, part, ()):
                    within = inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    yield from _statements(within, guarded=True)


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    """The module that `from x import` or `from .x import` names."""
    above = package.split(".")
    kept = above[: len(above) - statement.level + 1] if statement.level else []
    return ".".join([*kept, *([statement.module] if statement.module else [])])


def _file(module: str) -> Path | None:
    """The file of a module. Only its top package is looked up by Python, because `find_spec` would
    import the packages between."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # no name at all, or a module that was made by hand
        return None
    if spec is None:
        return None
    if not inner and spec.origin:
        return Path(spec.origin) if spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *inner)
        for file in (path.parent / f"{path.name}.py", path / "__init__.py"):
            if file.is_file():
                return file
    return None
