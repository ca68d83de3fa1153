"""By what the trials of a search are judged: a metric, and whether more or less of it is better."""

from __future__ import annotations

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
# Metrics that are no result of a validation.
CONTINUAL = ("train", "perf/", "lr", "system/", "epoch")


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
            what = f"{word!r} does not say whether more of it is better, or less"
            remedy = f"{OPTION} {word}:max or {OPTION} {word}:min"
            problems.append(Problem(OPTION, what, remedy, code="incomplete"))
    if not words:
        if isinstance(own, Problem):
            problems.append(own)
        else:
            found.append(own)
    names = [each.metric for each in found]
    for name in {name for name in names if names.count(name) > 1}:
        problems.append(Problem(OPTION, f"names {name} twice", code="ambiguous"))
    problems += _never_logged(found, plan.metrics, OPTION if words else MONITOR)
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
        what = "no metric judges the trials"
        return Problem(MONITOR, what, f"{OPTION} val/acc1:max", code="missing-key")
    if monitor == main or (monitor == DEFAULT and MONITOR not in typed):
        direction = str(settings.get("mode")) if MODE in typed else mode
        return Objective(main, direction)
    if MONITOR in typed and MODE not in typed:
        what = f"is missing: nobody says whether more of {monitor} is better, or less"
        return Problem(MODE, what, f"{MODE}=min or {MODE}=max", code="missing-key")
    return Objective(str(monitor), str(settings.get("mode")))


def _never_logged(
    found: Sequence[Objective], known: Mapping[str, Any], where: str
) -> Iterator[Problem]:
    logged: list[str] = known.get("logged") or []
    for each in found:
        is_known = bool(logged) and each.metric.startswith(f"{OF_VALIDATION}/")
        if is_known and each.metric not in logged:
            near = closest(each.metric, logged)
            value = near or logged[0]
            remedy = f"{OPTION} {value}:{each.mode}" if where == OPTION else f"{where}={value}"
            what = f"{each.metric} is never logged; a validation logs {', '.join(logged)}"
            yield Problem(where, what, remedy, code="not-found")
