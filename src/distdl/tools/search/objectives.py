"""By what the trials of a search are judged: a metric, and whether more or less of it is better."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distdl.launch.planning import Plan
from distdl.util.errors import Problem, UserError
from distdl.util.suggest import closest

MODES = ("max", "min")
MONITOR, MODE, OPTION = "checkpoint.monitor", "checkpoint.mode", "--metric"
OF_VALIDATION = "val"
DEFAULT = "val/acc1"  # as in conf/distdl.yaml, where nobody has chosen it
# Metrics that are no result of a validation, as any module may name them.
CONTINUAL = ("train", "perf/", "lr", "system/", "epoch")
# Those that distdl logs itself, besides the results of a validation.
OF_TRAINING = re.compile(r"(train|perf|system)/.+|lr([-/].+)?|epoch")


@dataclass(frozen=True)
class Objective:
    """A metric, and "max" or "min"."""

    metric: str
    mode: str

    @property
    def of_validation(self) -> bool:
        """Whether each validation of a run has a value of it."""
        return not self.metric.startswith(CONTINUAL)

    def better(self, one: float, other: float) -> bool:
        return one > other if self.mode == "max" else one < other

    def __str__(self) -> str:
        return f"{self.metric}:{self.mode}"


def of_words(words: Sequence[str], typed: Collection[str]) -> list[str]:
    """Overrides that make the runs choose their best.ckpt by the metric of `--metric`."""
    if len(words) != 1 or {MONITOR, MODE} & {*typed}:
        return []
    name, _, mode = words[0].rpartition(":")
    is_whole = mode in MODES and name.startswith(OF_VALIDATION)
    return [f"{MONITOR}={name}", f"{MODE}={mode}"] if is_whole else []


def problems_of(words: Sequence[str]) -> Iterator[Problem]:
    """What is wrong with `--metric` whatever the trials log."""
    for word in words:
        name, _, mode = word.rpartition(":")
        if name and mode.isalpha() and mode not in MODES:  # val/acc1:maximize
            yield _undirected(word, name)
    for word in dict.fromkeys(words):
        if words.count(word) > 1:
            yield Problem(OPTION, what=f"names {word} twice", code="ambiguous")


def _undirected(word: str, name: str) -> Problem:
    return Problem(
        OPTION,
        what=f"{word!r} does not say whether more of it is better, or less",
        remedy=f"{OPTION} {name}:max or {OPTION} {name}:min",
        code="incomplete",
    )


def chosen(words: Sequence[str], plan: Plan, typed: Collection[str]) -> list[Objective]:
    """The objectives of a search.

    Args:
        words: Of `--metric`: `val/loss:min`. Without any, the metric that chooses best.ckpt counts.
        plan: Of some trial, after its classes were checked.
        typed: The keys of the command line's overrides.

    Raises:
        UserError: There is no metric, nobody said which values are better, or it is known that no
            trial logs it.
    """
    settings = plan.config.get("checkpoint") or {}
    own = _of_runs(settings, plan.metrics, typed)
    found: list[Objective] = []
    problems: list[Problem] = []
    for word in words:
        name, _, mode = word.rpartition(":")
        if mode in MODES and name:
            found.append(Objective(name, mode))
        elif isinstance(own, Objective) and word == own.metric:
            found.append(own)
        else:
            problems.append(_undirected(word, word))
    if not words:
        if isinstance(own, Problem):
            problems.append(own)
        else:
            found.append(own)
    names = [each.metric for each in found]
    for name in {name for name in names if names.count(name) > 1}:
        problems.append(Problem(OPTION, what=f"names {name} twice", code="ambiguous"))
    logged = [] if _has_own_callbacks(plan.config) else plan.metrics.get("logged") or []
    problems += _never_logged(found, logged, OPTION if words else MONITOR)
    if problems:
        raise UserError(*problems)
    return found


def _of_runs(
    settings: Mapping[str, Any], known: Mapping[str, Any], typed: Collection[str]
) -> Objective | Problem:
    """The metric that chooses a run's best.ckpt, or why there is none."""
    monitor = settings.get("monitor")
    main, mode = known.get("main") or (DEFAULT, "max")
    if monitor is None:
        return Problem(
            MONITOR,
            what="no metric judges the trials",
            remedy=f"{OPTION} val/acc1:max",
            code="missing-key",
        )
    if monitor == main or (monitor == DEFAULT and MONITOR not in typed):
        direction = str(settings.get("mode")) if MODE in typed else mode
        return Objective(main, direction)
    if MONITOR in typed and MODE not in typed:
        return Problem(
            MODE,
            what=f"is missing: nobody says whether more of {monitor} is better, or less",
            remedy=f"{MODE}=min or {MODE}=max",
            code="missing-key",
        )
    return Objective(str(monitor), str(settings.get("mode")))


def _has_own_callbacks(config: Mapping[str, Any]) -> bool:
    """Whether a callback of the user's may log further metrics."""
    nodes = (config.get("callbacks") or {}).values()
    targets = [str(node["_target_"]) for node in nodes if node and "_target_" in node]
    return any(
        not target.startswith(("distdl.", "lightning.", "pytorch_lightning.")) for target in targets
    )


def _never_logged(
    found: Sequence[Objective], logged: Sequence[str], where: str
) -> Iterator[Problem]:
    """
    Args:
        logged: What a validation logs; empty: unknown.
    """
    for each in found:
        if logged and each.metric not in logged and not OF_TRAINING.fullmatch(each.metric):
            yield Problem(
                where,
                what=f"{each.metric} is never logged; a validation logs {', '.join(logged)}",
                remedy=instead(each, logged, where),
                code="not-found",
            )


def instead(objective: Objective, logged: Sequence[str], where: str = OPTION) -> str:
    """What to type for a metric that is not among those that are logged."""
    value = closest(objective.metric, logged) or logged[0]
    return f"{OPTION} {value}:{objective.mode}" if where == OPTION else f"{where}={value}"
