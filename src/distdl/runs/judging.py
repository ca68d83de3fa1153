"""By which metric a run is judged, its value, and which of several runs is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from distdl.runs import checkpoints
from distdl.runs.checkpoints import Judged

LEAST = 2  # runs that can be compared


class Score(NamedTuple):
    """The metric that chose a run's best.ckpt, and the run's best value of it; NaN: it has none."""

    judged: Judged
    value: float


def score(folder: Path, settings: Mapping[str, Any], metrics: object) -> Score:
    """The score of a run. Without a best.ckpt, the value is that at the end of its last attempt.

    Args:
        folder: Of its checkpoints.
        settings: The section `checkpoint` of its config; empty for a program.
        metrics: Of its last attempt's status.json.
    """
    judged = checkpoints.judged_by(folder, settings.get("monitor"), str(settings.get("mode")))
    best = checkpoints.manifest_at(folder / "best.ckpt").get("metrics")
    for values in (best, metrics):
        value = values.get(judged.monitor) if isinstance(values, Mapping) else None
        if isinstance(value, int | float):
            with suppress(OverflowError):  # an int of a file that somebody else wrote
                return Score(judged, float(value))
    return Score(judged, math.nan)


def best_of(scores: Mapping[int, Score]) -> int | None:
    """The key of the best score; NaN is worse than any other value. None if none has a value, or
    no two are judged by the same metric, or those with a value by different ones."""
    valued = {key: each for key, each in scores.items() if not math.isnan(each.value)}
    judged = {each.judged for each in valued.values()}
    compared = [each for each in scores.values() if each.judged in judged]
    if len(judged) != 1 or len(compared) < LEAST:
        return None
    choose = max if judged.pop().mode == "max" else min
    return choose(valued, key=lambda key: valued[key].value)
