"""Runs all cases of a module on two real gloo ranks, once in a test process."""

import functools
import tempfile
from pathlib import Path

from tests.strategies.ranks import Case, shared


@functools.cache
def results(module: str, timeout: float = 240) -> dict[str, list]:
    """case -> results of rank 0 and rank 1; `module.cases(folder)` gives (name, result)."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = shared(2).train(Case([], Path(folder), call=f"{module}:cases"), timeout).ranks
    return {name: [each[name] for each in ranks] for name in ranks[0]}
