"""Trainings paired by seed and fold: what an idea changes, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.speedrun.training import Trained

# A fold and a seed, on which two recipes are compared.
Place = tuple[int, int]

COLUMNS = ("idea", "against", "pairs (folds)", "accuracy", "difference", "CPU ratio")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


@dataclass(frozen=True)
class Compared:
    """An idea against another one, at the places where both were trained.

    Args:
        pairs: How many places these are.
        folds: How many folds are among them.
        accuracy: The idea's mean, from 0 to 1.
        difference: The mean of the paired differences; positive: the idea is better.
        error: Its standard error; None: of one pair, which says nothing of chance.
        cpu: The mean of the paired ratios of CPU time.
    """

    pairs: int
    folds: int
    accuracy: float
    difference: float
    error: float | None
    cpu: float


def compared(idea: Mapping[Place, Trained], other: Mapping[Place, Trained]) -> Compared | None:
    """None where no place has both."""
    places = sorted(idea.keys() & other.keys())
    if not places:
        return None
    differences = [idea[place].accuracy - other[place].accuracy for place in places]
    return Compared(
        pairs=len(places),
        folds=len({fold for fold, _ in places}),
        accuracy=statistics.mean(idea[place].accuracy for place in places),
        difference=statistics.mean(differences),
        error=standard_error(differences),
        cpu=statistics.mean(idea[place].cpu / other[place].cpu for place in places),
    )


def standard_error(values: list[float]) -> float | None:
    """Of their mean; None for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def spread(accuracies: Sequence[float]) -> float:
    """The standard deviation of seeds. Few may agree by chance, so it is at least half a point."""
    return max(deviation(accuracies), 0.005)


def row(name: str, other: str | None, result: Compared | None) -> str:
    """A line of the table below `HEADER`; percentages, and differences in points."""
    cells = [name, other or ""]
    if result is None:
        cells += ["0", "", "", ""]
    else:
        cells += [f"{result.pairs} ({result.folds})", f"{100 * result.accuracy:.1f} %"]
        error = "" if result.error is None else f" ± {100 * result.error:.1f}"
        difference = f"{100 * result.difference:+.1f}{error}"
        cells += [difference, f"{result.cpu:.2f}"] if other else ["", ""]
    return f"| {' | '.join(cells)} |"
