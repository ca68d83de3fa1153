"""How results are written down, and when a goal counts as reached."""

from __future__ import annotations

import importlib.metadata
import platform
import random
import re
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

NEAR = 0.02  # a goal so close to 1 also counts as reached inside the spread of A against A
WIDEST = 0.1  # a wider spread of A against A means that the machine was not idle
ROOT = Path(__file__).resolve().parents[1]
# What the benchmarks themselves write.
NO_CHANGE = (":!benchmarks/results", ":!benchmarks/RESULTS*.md")
HEADER = "| where | ratio | goal | measured | reached |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Goal:
    """A ratio and its goal.

    Args:
        what: Describes the ratio.
        goal: Begins with "at most" or "at least" and a number.
        measured: The ratio of the medians, or `paired` where arms take turns; None: not run.
        same: The range of the competitor's ratio to itself, by chance (`against_itself`).
        where: CPU or GPU.
    """

    what: str
    goal: str
    measured: float | None
    same: tuple[float, float] | None = None
    where: str = "CPU"

    @cached_property
    def _bound(self) -> tuple[str, float]:
        match = re.match(r"at (most|least) (\d+(?:\.\d+)?(?:e-?\d+)?)(?!\S)", self.goal)
        if match is None:
            raise ValueError(f"a goal begins with 'at most 1.0' or 'at least 1.0', not {self.goal}")
        return match[1], float(match[2])

    @property
    def state(self) -> str:
        """ "reached", "not reached", "undecided" or "not run"."""
        way, bound = self._bound
        if self.measured is None:
            return "not run"
        if self.measured <= bound if way == "most" else self.measured >= bound:
            return "reached"
        if self.same is not None and abs(bound - 1) <= NEAR + 1e-9:
            low, high = self.same
            if self.measured <= high if way == "most" else self.measured >= low:
                return "reached" if high - low <= WIDEST else "undecided"
        return "not reached"

    def row(self) -> str:
        way, bound = self._bound
        measured = "" if self.measured is None else f"{self.measured:.3f}"
        if self.measured is not None and self.same is not None:
            measured += f" (A/A {self.same[0]:.3f} to {self.same[1]:.3f})"
        sign = "<=" if way == "most" else ">="
        state = "**not reached**" if self.state == "not reached" else self.state
        return f"| {self.where} | {self.what} | {sign} {bound:g} | {measured} | {state} |"


@dataclass(frozen=True)
class Result:
    """One ratio against a named competitor.

    Args:
        ratio, same: See `Goal`.
        more: Further goals that were measured at the same time.
        where: CPU or GPU.
        what: Describes the ratio in the table of goals; by default the title.
    """

    title: str
    competitor: str
    goal: str
    ratio: float
    rows: list[str]
    command: str
    notes: str = ""
    same: tuple[float, float] | None = None
    more: list[Goal] = field(default_factory=list)
    where: str = "CPU"
    what: str = ""

    @property
    def goals(self) -> list[Goal]:
        first = Goal(self.what or self.title, self.goal, self.ratio, self.same, self.where)
        return [first, *self.more]

    def markdown(self) -> str:
        first, *more = self.goals
        further = [f"{g.what}: **{g.measured:.3f}** ({_how(g)})." for g in more if g.measured]
        parts = [
            f"## {self.title}",
            f"Competitor: {self.competitor}. Ratio **{self.ratio:.3f}** ({_how(first)}).",
            *([" ".join(further)] if further else []),
            "| | median | min | max | unit | repeats |\n|---|---|---|---|---|---|\n"
            + "\n".join(self.rows),
            *([self.notes] if self.notes else []),
            f"`{self.command}`",
        ]
        return "\n\n".join(parts)


def _how(goal: Goal) -> str:
    text = f"goal: {goal.goal}: {goal.state}"
    if goal.same is not None:
        low, high = goal.same
        text += f"; the competitor against itself, A/A: {low:.3f} to {high:.3f}"
    return text


def paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios, which a disturbance of a whole round does not change."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def against_itself(first: Sequence[float], again: Sequence[float]) -> tuple[float, float]:
    """The range of `paired` by chance alone, if A is compared with A in the same rounds.

    In each of 2000 draws, as many rounds are drawn at random, and either of the two values of a
    round is the first. The range holds 95 % of the ratios (percentile bootstrap, Efron 1979).

    Args:
        first, again: The competitor's values of each round, measured twice in it.

    Returns:
        The lowest and the highest ratio.
    """
    draw = random.Random(0)
    rounds = [a / b for a, b in zip(first, again, strict=True)]
    ratios = []
    for _ in range(2000):
        drawn = [draw.choice(rounds) for _ in rounds]
        ratios.append(statistics.median(r if draw.random() < 0.5 else 1 / r for r in drawn))
    ratios.sort()
    return ratios[int(0.025 * len(ratios))], ratios[int(0.975 * len(ratios))]


def added(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The median of the rounds' differences, and the interval that holds it with 95 % confidence
    (percentile bootstrap of 2000 draws, as above)."""
    draw = random.Random(0)
    rounds = [a - b for a, b in zip(ours, theirs, strict=True)]
    medians = sorted(statistics.median(draw.choices(rounds, k=len(rounds))) for _ in range(2000))
    return statistics.median(rounds), medians[50], medians[-51]


def turned(names: Sequence[str], number: int) -> list[str]:
    """The arms in the order of this round; each arm is first in some rounds."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def row(name: str, values: Sequence[float], unit: str) -> str:
    low = min(values)
    high = max(values)
    middle = statistics.median(values)
    return f"| {name} | {middle:.4g} | {low:.4g} | {high:.4g} | {unit} | {len(values)} |"


def commit() -> str:
    """Of distdl, with a + if files other than results have changed since; "unknown" without git."""
    try:
        name = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *NO_CHANGE)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}+" if changed else name


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def machine() -> str:
    """The machine and the versions, without which no number means anything."""
    import os

    import torch

    names = ("torch", "torchvision", "lightning", "hydra-core", "mlflow", "timm", "webdataset")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{os.cpu_count()} CPU cores ({_cpu()}), {gpu}, "
        f"Python {platform.python_version()}, {versions}"
    )


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return f"{platform.machine()}, {names[0]}" if names else platform.machine()
