"""Several runs beside each other: in what they differ, which is the best, and what chance does."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from distdl.job import JobState
from distdl.runs import judging
from distdl.tools.compare.facts import CHANGES, COMMIT, DATA, NOT_SET, SEED, UNKNOWN, ComparedRun

# Where a run ran changes no result, only its speed.
PLACES = "launcher."
COUNTS = ("val/samples", "epoch")


@dataclass(frozen=True)
class SettingDifference:
    """A setting or a fact that is not the same in all runs, with a text for each run."""

    key: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class SeedSpread:
    """What the seed alone does to the main metric.

    Args:
        names: The runs that differ by nothing else.
        spread: Of two runs the difference, of more the standard deviation.
    """

    names: tuple[str, ...]
    metric: str
    values: tuple[float, ...]
    spread: float


@dataclass(frozen=True)
class Comparison:
    """The first run is the one with which the others are compared."""

    runs: Sequence[ComparedRun]

    def __post_init__(self) -> None:
        """Members of two sweeps may have the same values: then their names tell them apart."""
        counts = Counter(run.label for run in self.runs)
        for run in self.runs:
            if counts[run.label] > 1:
                run.label = run.name

    @cached_property
    def differences(self) -> list[SettingDifference]:
        """In settings first, then in code and data, then in packages."""
        settings = self._different([run.settings for run in self.runs], NOT_SET)
        facts = self._different([run.facts for run in self.runs], UNKNOWN)
        known = [run.packages for run in self.runs]
        packages = self._different(known, "(none)") if all(known) else []
        return [*settings, *facts, *packages]

    @staticmethod
    def _different(each: Sequence[Mapping[str, str]], absent: str) -> list[SettingDifference]:
        keys = dict.fromkeys(key for texts in each for key in texts)
        rows = (
            SettingDifference(key, tuple(texts.get(key, absent) for texts in each)) for key in keys
        )
        return [row for row in rows if len(set(row.texts)) > 1]

    @cached_property
    def same(self) -> list[tuple[str, str]]:
        """Code and data, where they are known to be the same in all runs."""
        first = self.runs[0].facts
        different = {row.key for row in self.differences}
        keys = (key for key in (COMMIT, CHANGES, DATA) if key not in different)
        return [(key, first[key]) for key in keys if first[key] != UNKNOWN]

    @cached_property
    def unknown(self) -> dict[str, list[str]]:
        """Of code and data, the names of the runs of which it is not known."""
        found = {
            key: [run.name for run in self.runs if run.facts[key] == UNKNOWN]
            for key in (COMMIT, DATA)
        }
        return {key: names for key, names in found.items() if names}

    @cached_property
    def best(self) -> int | None:
        """The index of the best run that succeeded, see `judging.best_of`."""
        ended = JobState.SUCCEEDED
        scores = {n: run.score for n, run in enumerate(self.runs) if run.state == ended}
        return judging.best_of(scores)

    @cached_property
    def metrics(self) -> list[str]:
        """Names of the metrics to compare: those that chose a best.ckpt first, then the other ones
        of the validation, then the training's loss."""
        logged = sorted({name for run in self.runs for name in run.values})
        chosen = [run.monitor for run in self.runs if run.monitor in run.values]
        of_validation = [n for n in logged if n.startswith("val/") and n not in COUNTS]
        losses = [name for name in of_validation if "loss" in name]
        others = [name for name in of_validation if name not in losses]
        of_training = [name for name in ("train/loss",) if name in logged]
        return [*dict.fromkeys((*chosen, *others, *losses, *of_training))]

    @cached_property
    def seeds(self) -> list[SeedSpread]:
        """For each group of runs that differ by the seed alone."""
        groups: dict[tuple[object, ...], list[ComparedRun]] = {}
        for run in self.runs:
            settings = {k: v for k, v in run.settings.items() if k != SEED}
            settings = {k: v for k, v in settings.items() if not k.startswith(PLACES)}
            alike = (*sorted(settings.items()), *run.facts.items(), *sorted(run.packages.items()))
            groups.setdefault(alike, []).append(run)
        return [spread for group in groups.values() for spread in self._spread_of(group)]

    def _spread_of(self, group: Sequence[ComparedRun]) -> list[SeedSpread]:
        metric = self.metrics[0] if self.metrics else ""
        valued = [run for run in group if not math.isnan(run.values.get(metric, math.nan))]
        if len({run.settings.get(SEED) for run in valued}) < judging.LEAST:
            return []
        values = tuple(run.values[metric] for run in valued)
        spread = abs(values[0] - values[1]) if len(values) == 2 else statistics.stdev(values)
        return [SeedSpread(tuple(run.name for run in valued), metric, values, spread)]

    def mode(self, metric: str) -> str:
        """ "max" or "min" if all runs agree, else ""."""
        modes = {run.mode(metric) for run in self.runs if metric in run.values}
        return modes.pop() if len(modes) == 1 else ""
