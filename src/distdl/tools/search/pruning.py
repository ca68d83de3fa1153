"""Which trials of a search train on: decided by Optuna's pruners, or by halving that pauses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from distdl.config import recipe as configs
from distdl.launch.planning import Plan
from distdl.runs.verdicts import Word
from distdl.tools.search import halving
from distdl.tools.search.engine import SearchEngine, TrialEnd
from distdl.tools.search.halving import Rungs, Standing
from distdl.tools.search.objectives import Objective
from distdl.tools.search.trials import SearchTrial
from distdl.util.errors import Problem
from distdl.util.wording import plural

if TYPE_CHECKING:
    from optuna.pruners import BasePruner

HALVING = "halving"
STARTUP_TRIALS = 4  # that end before the median of others counts


class Pruning(ABC):
    """Decides about trials, each time that one has new values.

    Attributes:
        pauses: Whether a run that has stopped at the search's word may go on.
    """

    pauses = False

    @abstractmethod
    def word(self, trial: SearchTrial) -> Word:
        """What a running trial is told after its newest validation."""

    def resumable(self, trials: Sequence[SearchTrial], *, closed: bool) -> list[SearchTrial]:
        """Paused trials that train on, the most advanced first.

        Args:
            trials: All of the study, by their numbers.
            closed: Whether no further trial will come.
        """
        return []

    def lost(self, trials: Sequence[SearchTrial], *, closed: bool) -> list[SearchTrial]:
        """Paused trials that are pruned."""
        return []


class EnginePruning(Pruning):
    """Optuna's pruners: a trial that they stop has ended."""

    def __init__(self, engine: SearchEngine) -> None:
        self.engine = engine
        self.pruned: set[int] = set()  # by the numbers of the trials

    def word(self, trial: SearchTrial) -> Word:
        values = trial.curve.values
        for position in range(trial.reported, len(values)):
            # A trial that did not wait has more values than one, and trains on until it hears.
            if self.engine.report(trial.number, position + 1, values[position]):
                self.pruned.add(trial.number)
        trial.reported = len(values)
        return Word.PRUNE if trial.number in self.pruned else Word.GO_ON


class Halving(Pruning):
    """See `tools/search/halving.py`.

    Args:
        rungs: Of all trials.
    """

    pauses = True

    def __init__(self, engine: SearchEngine, objective: Objective, rungs: Rungs) -> None:
        self.engine = engine
        self.objective = objective
        self.rungs = rungs
        self.allowed: dict[int, int] = {}  # by the number of the trial

    def word(self, trial: SearchTrial) -> Word:
        values = trial.curve.values
        for position in range(trial.reported, len(values)):
            self.engine.report(trial.number, position + 1, values[position])
        trial.reported = len(values)
        until = self.allowed.get(trial.number, self.rungs.ends[0])
        is_last = until == self.rungs.ends[-1]  # the training ends there by itself
        return Word.PAUSE if len(values) >= until and not is_last else Word.GO_ON

    def resumable(self, trials: Sequence[SearchTrial], *, closed: bool) -> list[SearchTrial]:
        self._decide(trials, closed=closed)
        paused = (trial for trial in trials if trial.slot is None and trial.is_paused)
        due = [each for each in paused if len(each.curve.values) < self.allowed[each.number]]
        return sorted(due, key=lambda each: -self.allowed[each.number])

    def lost(self, trials: Sequence[SearchTrial], *, closed: bool) -> list[SearchTrial]:
        self._decide(trials, closed=closed)
        paused = (trial for trial in trials if trial.slot is None and trial.is_paused)
        return [each for each in paused if not self.allowed[each.number]]

    def _decide(self, trials: Sequence[SearchTrial], *, closed: bool) -> None:
        own = [trial for trial in trials if trial.repeats is None]
        size = self.rungs.bracket
        for start in range(0, len(own), size):
            bracket = own[start : start + size]
            standings = {trial.number: self._standing(trial) for trial in bracket}
            whole = len(bracket) == size or closed
            self.allowed |= halving.decide(standings, self.rungs, self.objective, complete=whole)

    def _standing(self, trial: SearchTrial) -> Standing:
        values = trial.curve.values
        if trial.end is TrialEnd.COMPLETE:  # it may have stopped early by itself
            last = values[-1] if values else math.nan
            values += [last] * (self.rungs.ends[-1] - len(values))
        return Standing(values, trial.end is TrialEnd.FAILED)


def chosen(name: str | None, engine: SearchEngine, validations: int | None) -> Pruning | None:
    """Who decides; None: every trial is trained to its end.

    Args:
        validations: Of a whole training; None: unknown.
    """
    if name == HALVING:
        assert validations is not None  # as `problems` has checked
        return Halving(engine, engine.objectives[0], Rungs.of(validations))
    return EnginePruning(engine) if name else None


def of_engine(name: str | None, validations: int | None) -> Callable[[], BasePruner] | None:
    """Optuna's pruner of a name; None: it prunes nothing.

    Args:
        validations: Of a whole training; None: unknown.
    """
    if name in (None, HALVING):
        return None

    def make() -> BasePruner:
        from optuna import pruners

        if name == "median":
            return pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS)
        if name == "hyperband":
            return pruners.HyperbandPruner(1, validations or "auto", halving.FACTOR)
        if name == "asha":
            return pruners.SuccessiveHalvingPruner(1, halving.FACTOR)
        raise ValueError(f"there is no pruner {name!r}")

    return make


def problems_of(name: str | None, metrics: Sequence[str]) -> Iterator[Problem]:
    """What is wrong with a pruner whatever the trials are. `metrics`: of `--metric`."""
    if name is not None and len(metrics) > 1:
        yield Problem(
            f"--pruner {name}",
            what="compares trials by one metric, and there are several objectives",
            remedy="one --metric, or no --pruner",
            code="conflict",
        )


def problems(
    name: str | None,
    objectives: Sequence[Objective],
    first: Plan,
    searched: Sequence[str],
    *,
    discards: bool,
) -> list[Problem]:
    """Why a search cannot prune in this way.

    Args:
        first: The plan of some trial.
        searched: The keys that have a space.
        discards: Whether pruned trials lose their checkpoints.
    """
    if name is None:
        return []
    flag = f"--pruner {name}"
    if problem := _out_of_reach(name, first, discards):
        return [problem]
    if not objectives[0].of_validation:
        return [
            Problem(
                flag,
                what=f"compares validations, and {objectives[0].metric} is no result of one",
                remedy="--metric val/loss:min, or no --pruner",
                code="conflict",
            )
        ]
    problem = halving.problem_of(first.config, searched) if name == HALVING else None
    if problem is None and not {*halving.LENGTHS} & {*searched}:
        problem = _too_short(flag, first.config)
    return [problem] if problem else []


def _out_of_reach(name: str, first: Plan, discards: bool) -> Problem | None:
    """A trial's journal, or its checkpoints, are where a search cannot work with them."""
    launcher = first.launch.launcher
    if launcher is None:
        return None
    flag = f"--pruner {name}"
    node = configs.plain(first.config.launcher)
    if remedy := launcher.hides_trials(node):
        return Problem(
            flag,
            what=(
                "must follow trials and answer them while they train, which these settings prevent"
            ),
            remedy=f"{remedy}, or no --pruner",
            code="unsupported",
        )
    if name == HALVING and launcher.keeps_files_elsewhere(node):
        return Problem(
            flag,
            what=(
                "pauses trials at the end of a rung, "
                "and a verdict in a platform's store comes later"
            ),
            remedy="--pruner asha",
            code="unsupported",
        )
    if discards and launcher.keeps_files_elsewhere(node):
        remove = "--pruned-checkpoints remove"
        return Problem(
            remove,
            what="removes no checkpoints from a platform's store: delete them there",
            remedy="--pruned-checkpoints keep",
            code="unsupported",
        )
    return None


def _too_short(flag: str, config: DictConfig) -> Problem | None:
    """Nobody asks for a verdict after the last validation of a training."""
    count = halving.validations_of(config)
    if count is None or count > 1:
        return None
    epochs = config.trainer.max_epochs
    length = f"{epochs} {plural('epoch', epochs)} with {count} {plural('validation', count)}"
    return Problem(
        flag,
        what=f"has nothing to end early in {length}",
        remedy="trainer.max_epochs=9, or no --pruner",
        code="not-enough",
    )
