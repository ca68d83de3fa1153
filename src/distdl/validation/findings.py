"""What stage 2 of validation finds in a config: problems, notes for the user, and facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distdl.config.paths import path_text
from distdl.util.errors import Problem
from distdl.util.extras import install
from distdl.util.typed import Path


class ConfigFindings:
    """Collects what is found.

    Args:
        local: Whether the run is on this machine, where all that it needs must be installed.
        expressions: The `${...}` that values of the config were before they were resolved.
    """

    def __init__(self, *, local: bool, expressions: Mapping[Path, str]) -> None:
        self.local = local
        self.expressions = expressions
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.facts: dict[str, Any] = {"model_configures_optimizers": None}

    def add(self, path: Path, what: str, remedy: str = "", *, code: str) -> None:
        self.problems.append(Problem(path_text(path), what=what, remedy=remedy, code=code))

    def absent(self, package: str, path: Path) -> None:
        if self.local:
            what = f"needs the package {package}, which is not installed"
            self.add(path, what, install(package), code="not-installed")
        else:
            what = f"not checked: {path_text(path)}: package {package} is not installed here"
            self.notes.append(f"{what}; to check it: {install(package)}")

    def drop_consequences(self) -> None:
        """Drops the problems of values that refer to a wrong value, which is reported."""
        self.problems = [each for each in self.problems if not self._follows(each.path, each.what)]

    def _follows(self, path: str, what: str) -> bool:
        refers = {path_text(path): text[2:-1] for path, text in self.expressions.items()}
        built = [p for p in refers if p.startswith(f"{path}.") and "cannot be built" in what]
        for origin in (path, *built):
            while origin in refers:
                origin = refers[origin]
            if origin != path and origin in (problem.path for problem in self.problems):
                return True
        return False
