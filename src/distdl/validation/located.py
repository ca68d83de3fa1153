"""Imports what a `_target_` names, and says why it cannot be imported or is not accepted."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any, TypeGuard

from distdl.config.hints import lightning_1
from distdl.config.own_code import is_installed
from distdl.config.paths import path_text
from distdl.util.errors import Problem
from distdl.util.shadowing import shadowing
from distdl.util.suggest import closest
from distdl.util.typed import Path
from distdl.validation import kinds, own_tasks
from distdl.validation.findings import ConfigFindings
from distdl.validation.targets import Trust

# Files whose lines are not to blame if an import or a check fails.
OURS = (
    "distdl/validation/located.py",
    "distdl/validation/own_checks.py",
    "distdl/util/imports.py",
)


def locate(target: str, path: Path, trust: Trust, findings: ConfigFindings) -> object:
    """Imports what a dotted path names; None (and a problem or a note) if that fails."""
    path = (*path, "_target_")
    package = target.partition(".")[0]
    if is_absent(package):
        findings.absent(package, path)
        return None
    typed = sys.argv
    try:
        sys.argv = [target]  # a parser that runs at import prints this name
        return kinds.locate(target)
    except kinds.NoSuchName as error:
        modules = [m.name for m in pkgutil.iter_modules(getattr(error.owner, "__path__", ()))]
        public = [name for name in vars(error.owner) if not name.startswith("_")]
        near = closest(error.missing, [*modules, *public])
        remedy = f"did you mean {error.reached}.{near}?" if near else ""
        findings.add(path, str(error), remedy, code="incomplete")
    except (Exception, SystemExit) as error:  # an import runs the module's code
        if shadowing(error, trust.folders):
            raise  # all further imports would fail in the same way
        package = str(getattr(error, "name", None)).partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and is_absent(package):
            findings.absent(package, path)
            return None
        remedy = lightning_1.replaced(error) + origin(error)
        if isinstance(error, SystemExit):
            remedy += ': put the code of a script under if __name__ == "__main__":'
        what = f"{target} cannot be imported: {in_short(error)}"
        findings.add(path, what, remedy, code="failed")
    finally:
        sys.argv = typed
    return None


def accepted(
    called: object, node: dict[str, Any], path: Path, trust: Trust, findings: ConfigFindings
) -> TypeGuard[Callable[..., Any]]:
    """Whether the target can be called and is of the kind that its section accepts."""
    target = node["_target_"]
    location = (*path, "_target_")
    why: Problem | None = None
    missing = ", ".join(sorted(getattr(called, "__abstractmethods__", ())))
    if not callable(called):
        why = Problem(
            path_text(location),
            what=f"{target} is a {type(called).__name__}, not a class or function",
            code="wrong-kind",
        )
    elif missing:
        why = Problem(
            path_text(location),
            what=f"{target} is abstract: it does not define {missing}",
            code="incomplete",
        )
    else:
        why = kinds.problem_of_kind(called, node, path, trust)
    if path == ("task",) and why is None:
        why = own_tasks.problem(called, target)
    if why:
        findings.problems.append(why)
    return why is None


def is_absent(package: str) -> bool:
    return package not in sys.modules and importlib.util.find_spec(package) is None


def in_short(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def origin(error: BaseException) -> str:
    """File and line where an import or a check failed, for the user to look at."""
    if isinstance(error, SyntaxError):
        return f"see {error.filename}, line {error.lineno}"
    last = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = FilePath(frame.f_code.co_filename)
        # For an exit, argparse is the last frame, but the user's call is to blame.
        library = isinstance(error, SystemExit) and is_installed(file)
        if file.is_file() and not file.as_posix().endswith(OURS) and not library:
            last = f"see {file}, line {line}"
    return last
