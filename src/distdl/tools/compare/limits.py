"""Limits for a pipeline of CI: how much worse or slower than the first run another may be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distdl.job import JobState
from distdl.tools.compare.comparison import Comparison
from distdl.tools.compare.facts import SPEED, ComparedRun
from distdl.util.errors import Problem, UserError
from distdl.util.wording import first_few

AMOUNT = re.compile(r"(\d+\.?\d*|\.\d+)(%?)", re.ASCII)
AMOUNTS = "0.5% (of the first run's value) or 0.005"
WORSE, SLOWER = "--fail-worse", "--fail-slower"


@dataclass(frozen=True)
class RunLimit:
    """A metric may be worse than the first run's by an amount, or by a share of that value."""

    flag: str
    metric: str
    amount: float
    is_share: bool
    mode: str = ""  # "max" or "min"

    def __str__(self) -> str:
        return f"{100 * self.amount:g} %" if self.is_share else f"{self.amount:g}"


@dataclass(frozen=True)
class LimitResult:
    """How one run keeps one limit. `loss` is how much worse it is; below 0: it is better. A run
    that has not succeeded keeps none: nobody knows where it would have ended."""

    limit: RunLimit
    name: str
    first: float
    value: float
    loss: float
    state: str

    @property
    def passed(self) -> bool:
        return self.state == JobState.SUCCEEDED and self.loss <= self.limit.amount

    def __str__(self) -> str:
        how = "better" if self.loss < 0 else "worse"
        by = f"{abs(self.loss):.4g}"
        if self.limit.is_share:
            by = f"{100 * abs(self.loss):.3g} %"
        what = f"{self.limit.metric} {self.value:.6g}, {by} {how} than {self.first:.6g}"
        if math.isnan(self.value):
            what = f"{self.limit.metric} is NaN, and the first run's {self.first:.6g}"
        if self.state != JobState.SUCCEEDED:
            what += f", and the run is {self.state}"
        return f"{what} (limit {self.limit})"


def parsed(worse: Sequence[str], slower: str | None) -> list[RunLimit]:
    """The limits of `--fail-worse METRIC:AMOUNT` and `--fail-slower AMOUNT`.

    Raises:
        UserError: All that are none.
    """
    limits = []
    problems = []
    for text in worse:
        metric, _, amount = text.rpartition(":")
        found = AMOUNT.fullmatch(amount)
        if metric and found:
            limits.append(_limit(WORSE, metric, found))
        else:
            problems.append(
                Problem(
                    WORSE,
                    what=f"{text!r} is no METRIC:AMOUNT",
                    remedy=f"{WORSE} val/acc1:0.5%, where AMOUNT is {AMOUNTS}",
                    code="wrong-kind",
                )
            )
    if slower is not None:
        found = AMOUNT.fullmatch(slower)
        if found and found[2]:
            limits.append(_limit(SLOWER, SPEED, found, mode="max"))
        else:
            problems.append(
                Problem(
                    SLOWER,
                    what=f"{slower!r} is no share of a speed",
                    remedy=f"{SLOWER} 5%",
                    code="wrong-kind",
                )
            )
    if problems:
        raise UserError(*problems)
    return limits


def _limit(flag: str, metric: str, found: re.Match[str], mode: str = "") -> RunLimit:
    is_share = bool(found[2])
    return RunLimit(flag, metric, float(found[1]) / (100 if is_share else 1), is_share, mode)


def check(comparison: Comparison, limits: Sequence[RunLimit]) -> list[LimitResult]:
    """Each run but the first, by each limit.

    Raises:
        UserError: A run has no value of a metric, or nobody knows which value is better, or the
            first run has not succeeded.
    """
    first, *others = comparison.runs
    problems: list[Problem] = []
    if limits and first.state != JobState.SUCCEEDED:
        problems.append(
            Problem(
                limits[0].flag,
                what=f"{first.name} is {first.state}, so it is no measure for the others",
                remedy="name a run first that has succeeded",
                code="conflict",
            )
        )
    results = []
    for limit in limits:
        problems += _problems(comparison, limit)
        if problems:
            continue
        mode = limit.mode or comparison.mode(limit.metric)
        start = _value(first, limit.metric)
        for run in others:
            value = _value(run, limit.metric)
            lost = start - value if mode == "max" else value - start
            loss = lost / abs(start) if limit.is_share else lost
            results.append(LimitResult(limit, run.name, start, value, loss, run.state))
    if problems:
        raise UserError(*problems)
    return results


def _problems(comparison: Comparison, limit: RunLimit) -> Iterator[Problem]:
    flag, metric = limit.flag, limit.metric
    unmeasured = [run.name for run in comparison.runs if metric == SPEED and math.isnan(run.speed)]
    if unmeasured:
        yield Problem(
            flag,
            what=f"no speed was recorded in {', '.join(unmeasured)}",
            remedy=f"no {flag}, or in a run that short trainer.log_every_n_steps=1",
            code="not-found",
        )
        return
    lacking = [run.name for run in comparison.runs if metric not in run.values]
    if lacking:
        known = ", ".join(comparison.metrics) or "nothing was logged"
        yield Problem(
            flag,
            what=f"{metric} was not logged by {first_few(lacking)}",
            remedy=f"one of: {known}",
            code="not-found",
        )
        return
    if not (limit.mode or comparison.mode(metric)):
        yield Problem(
            flag,
            what=f"nobody knows whether more or less of {metric} is better",
            remedy=f"checkpoint.monitor={metric} checkpoint.mode=min|max says so, in the runs",
            code="ambiguous",
        )
    start = _value(comparison.runs[0], metric)
    if not math.isfinite(start) or (limit.is_share and start == 0):
        yield Problem(
            flag,
            what=f"{metric} of the first run is {start}, so that nothing is worse by a share of it",
            remedy="name a run that has a value first",
            code="conflict",
        )


def _value(run: ComparedRun, metric: str) -> float:
    """The value that counts; NaN if the metric is NaN at the end, whatever best.ckpt has."""
    if metric == SPEED:
        return run.speed
    ended = run.reported.values(metric)[-1:]
    return math.nan if any(map(math.isnan, ended)) else run.values[metric]
