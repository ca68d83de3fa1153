"""Runs all cases of a module on two real gloo ranks, once in a test process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from tests.strategies import ranks


@functools.cache
def results(module: str, timeout: float = 240) -> dict[str, list[Any]]:
    """case -> what rank 0 and rank 1 found; `module.cases(folder)` gives (name, what it found)."""
    with tempfile.TemporaryDirectory() as folder:
        case = ranks.Case([], Path(folder), call=f"{module}:cases")
        found = ranks.shared(2).train(case, timeout).found
    return {name: [each[name] for each in found] for name in found[0]}
