"""A comparison for a program: the same values as the table and the page have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from distdl.tools.compare.comparison import Comparison
from distdl.tools.compare.facts import ComparedRun
from distdl.tools.compare.limits import LimitResult


@dataclass(frozen=True)
class ComparedRuns:
    """Runs beside each other; the first one is that with which the others are compared."""

    SCHEMA: ClassVar[str] = "compare/1"

    runs: Sequence[Mapping[str, Any]]
    """Each with `run`, `label`, `state`, `metrics` (the best value if it is known which is better,
    else the last), `monitor`, `speed` (samples per second), `seconds`, `devices`, `device_hours`
    and `usd`; null is unknown."""
    best: str | None
    """The best run that succeeded; null if there are no two with a value of one metric."""
    differences: Mapping[str, Sequence[str]]
    """Settings, code, data set and packages that differ: a text for each run."""
    seeds: Sequence[Mapping[str, Any]]
    """Groups of `runs` that differ by the seed alone, with the `spread` of the `metric`."""
    limits: Sequence[Mapping[str, Any]]
    """How each `run` keeps each `limit`, with `metric`, `first`, `value` and `passed`."""
    page: str | None
    """The HTML file; null if none was written."""


def answer_of(
    comparison: Comparison, checked: Sequence[LimitResult], page: str | None
) -> ComparedRuns:
    """The answer of `distdl compare`."""
    runs = comparison.runs
    return ComparedRuns(
        runs=[_run(run, comparison.metrics) for run in runs],
        best=None if comparison.best is None else runs[comparison.best].name,
        differences={row.key: [*row.texts] for row in comparison.differences},
        seeds=[
            {"runs": [*each.names], "metric": each.metric, "spread": each.spread}
            for each in comparison.seeds
        ],
        limits=[
            {
                "run": each.name,
                "metric": each.limit.metric,
                "first": each.first,
                "value": each.value,
                "limit": str(each.limit),
                "passed": each.passed,
            }
            for each in checked
        ],
        page=page,
    )


def _run(run: ComparedRun, metrics: Sequence[str]) -> dict[str, Any]:
    return {
        "run": run.name,
        "label": run.label,
        "state": run.state,
        "metrics": {name: run.values.get(name) for name in metrics},
        "monitor": run.monitor or None,
        "speed": None if math.isnan(run.speed) else run.speed,
        "seconds": run.seconds,
        "devices": run.devices,
        "device_hours": run.device_hours,
        "usd": run.price,
    }
