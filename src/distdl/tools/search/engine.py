"""The engine that proposes values: Optuna, and a study in a file or behind an address.

Only the command that searches talks to it. The file is Optuna's journal, one line for each change,
so that other tools (optuna-dashboard) read it meanwhile.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import math
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from distdl.runs.directory import shown
from distdl.tools.search import storage
from distdl.tools.search.objectives import Objective
from distdl.tools.search.spaces import Searched, Space, Value
from distdl.tools.search.storage import Address, Direction
from distdl.util.errors import Problem, UserError
from distdl.util.extras import install
from distdl.util.redact import redact
from distdl.util.screen import escaped, say

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

# Attributes of the study and of its trials.
SEARCHED = "distdl.searched"
SEED = "distdl.seed"
RUN = "distdl.run"
JUDGED = "distdl.judged"
DIRECTIONS: Mapping[str, Direction] = {"max": "maximize", "min": "minimize"}
PATIENCE_S = 300.0  # for which a storage may fail
MOST_POINTS = 1_000_000  # of a grid
KEY_OF_SPACE = re.compile(r"^Space\(key='([^']*)'")

Result = TypeVar("Result")


class TrialEnd(StrEnum):
    """How a trial ended for the engine."""

    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAILED = "FAIL"


@dataclass(frozen=True)
class Proposal:
    """Values that the engine has proposed.

    Args:
        number: Of the trial, from 0.
        values: By key, as `Space.distribution` has them.
        end: How it ended; None: it has not.
        results: A value for each objective, if it ended COMPLETE.
    """

    number: int
    values: Mapping[str, object]
    end: TrialEnd | None = None
    results: Sequence[float] = ()


class SearchEngine:
    """One study. Opened again, it knows the trials that it has proposed before.

    Args:
        folder: Of the study's file, unless the study has an address.
        seed: Of the values; that of the first command counts.
        pruner: One of Optuna's; None: every trial is trained to its end.
    """

    def __init__(
        self,
        searched: Searched,
        folder: Path,
        name: str,
        objectives: Sequence[Objective],
        *,
        sampler: str = "tpe",
        seed: int | None = None,
        address: Address | None = None,
        pruner: Callable[[], BasePruner] | None = None,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.searched = searched
        self.address = address
        self.place = address.shown if address else shown(folder / storage.JOURNAL)
        self.objectives = objectives
        self.spaces = {space.key: space.distribution() for space in searched.spaces}
        self.grid = _grid(searched.spaces) if sampler == "grid" else None
        directions = [DIRECTIONS[each.mode] for each in objectives]
        self.study: Study = storage.opened(address, folder, name, directions)
        self.study.pruner = pruner() if pruner else optuna.pruners.NopPruner()
        mine = self._described()
        self._refuse_another(mine, directions)
        self.key = storage.claimed(self.study, folder, address)
        if self.study.user_attrs.get(SEARCHED) is None:
            self.study.set_user_attr(SEARCHED, mine)
        if self.study.user_attrs.get(SEED) is None:
            self.study.set_user_attr(SEED, seed)
        self.seed: int | None = self.study.user_attrs.get(SEED)
        # A sampler has no memory of its own: with the seed alone it would propose its first values
        # again when a search goes on.
        begun = len(self.study.get_trials(deepcopy=False))
        moved = None if self.seed is None else self.seed + begun
        self.study.sampler = _sampler(sampler, moved)

    def _described(self) -> str:
        """What a study searches: a search of something else may not go on with it."""
        names = [str(each) for each in self.objectives]
        spaces = sorted(repr(space) for space in self.searched.spaces)
        return json.dumps([sorted(self.searched.fixed), spaces, names])

    def _refuse_another(self, mine: str, directions: Sequence[Direction]) -> None:
        theirs = self.study.user_attrs.get(SEARCHED)
        if theirs not in (None, mine):
            raise UserError.at(
                "name",
                what=f"the study {self.study.study_name} has {_other(theirs, mine)}",
                remedy="choose another name=STUDY",
                code="mismatch",
            )
        differs = [each.name.lower() for each in self.study.directions] != [*directions]
        if differs or (theirs is None and self.study.get_trials(deepcopy=False)):
            raise UserError.at(
                "name",
                what=(
                    f"the study {self.study.study_name} was made by another program than distdl "
                    "tune"
                ),
                remedy="choose another name=STUDY",
                code="mismatch",
            )

    @property
    def count(self) -> int | None:
        """How many different trials there can be; None: no end."""
        return None if self.grid is None else len(self.grid)

    def known(self) -> list[Proposal]:
        """All trials so far, by their numbers, but for one that a command has proposed only in part
        before it was killed: `propose` goes on with that."""
        return self._patiently(self._known)

    def _known(self) -> list[Proposal]:
        from optuna.trial import TrialState

        found = []
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state is TrialState.WAITING:
                continue
            if trial.params.keys() == self.spaces.keys():
                end = TrialEnd(trial.state.name) if trial.state.is_finished() else None
                results = trial.values or () if end is TrialEnd.COMPLETE else ()
                found.append(Proposal(trial.number, trial.params, end, results))
        return found

    def propose(self) -> Proposal:
        """The values of a new trial."""
        return self._patiently(self._propose)

    def _propose(self) -> Proposal:
        if self.study.user_attrs.get(storage.KEY) != self.key:  # both began at the same time
            raise storage.not_ours(self.study, self.address)
        if (begun := self._begun()) is not None:
            trial = self._trial(begun)
        else:
            if self.grid is not None:
                self._enqueue_next()
            trial = self.study.ask()
        for key, distribution in self.spaces.items():
            trial._suggest(key, distribution)  # as `ask` does; what was suggested before is kept
        return Proposal(trial.number, trial.params)

    def _begun(self) -> int | None:
        """The trial of which some values are missing: the command that asked for it was killed, or
        the storage failed."""
        from optuna.trial import TrialState

        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        partial = (each.number for each in running if each.params.keys() != self.spaces.keys())
        return next(partial, None)

    def _enqueue_next(self) -> None:
        """Lets the next trial have the first point of the grid that no trial has, in an order that
        the seed decides: a search that ends early has seen all of it roughly."""
        from optuna.trial import TrialState

        assert self.grid is not None
        trials = self.study.get_trials(deepcopy=False)
        if any(trial.state is TrialState.WAITING for trial in trials):
            return
        seen = {tuple(trial.params.get(key) for key in self.spaces) for trial in trials}
        order = random.Random(self.seed).sample(range(len(self.grid)), len(self.grid))
        free = (self.grid[n] for n in order if self.grid[n] not in seen)
        if (point := next(free, None)) is not None:
            self.study.enqueue_trial(dict(zip(self.spaces, point, strict=True)))

    def note_run(self, number: int, run: str) -> None:
        """Keeps the trial's run in the study, for whoever looks at that alone."""
        self._patiently(lambda: self._trial(number).set_user_attr(RUN, run))

    def report(self, number: int, validation: int, value: float) -> bool:
        """Tells the value of a validation, counted from 1; whether the trial is to be pruned. "Yes"
        is final, and a command that goes on with the study gets the same answer."""

        def tell() -> bool:
            trial = self._trial(number)
            judged = trial.user_attrs.get(JUDGED) or {"validation": 0, "prune": False, "notes": {}}
            if validation > judged["validation"]:
                trial.report(value, validation)
                prune, notes = (True, {}) if judged["prune"] else self._asked(trial._trial_id)
                if notes or prune > judged["prune"]:
                    judged = {"validation": validation, "prune": prune, "notes": notes}
                    trial.set_user_attr(JUDGED, judged)
            storage = self.study._storage
            noted = storage.get_trial(trial._trial_id).system_attrs
            for key in judged["notes"].keys() - noted.keys():
                storage.set_trial_system_attr(trial._trial_id, key, judged["notes"][key])
            return bool(judged["prune"])

        return self._patiently(tell)

    def _asked(self, trial_id: int) -> tuple[bool, dict[str, Any]]:
        """Whether the pruner ends a trial, and what it would note about it. A pruner that finds its
        own note takes the trial for one of the next rung. So the answer is stored before the notes.
        """
        notes: dict[str, Any] = {}
        study = copy.copy(self.study)
        study._storage = _Noting(self.study._storage, notes)  # type: ignore[assignment]
        prune = self.study.pruner.prune(study, self.study._storage.get_trial(trial_id))
        return bool(prune), notes  # a pruner may answer with a bool of NumPy's

    def tell(self, number: int, end: TrialEnd, values: Sequence[float] = ()) -> None:
        """How a trial ended, with a value for each objective if it is complete."""
        from optuna.trial import TrialState

        def told() -> None:
            finished = self.study.get_trials(deepcopy=False)[number].state.is_finished()
            if finished:  # the answer to the first try was lost
                return
            if end is TrialEnd.COMPLETE:
                self.study.tell(number, [*values])
            else:
                self.study.tell(number, state=TrialState[end.value])

        self._patiently(told)

    def importances(self) -> dict[str, float]:
        """The share of each key in what tells good trials from the others, the largest first."""
        from optuna import importance

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluator = importance.PedAnovaImportanceEvaluator()
            return importance.get_param_importances(self.study, evaluator=evaluator)

    def _trial(self, number: int) -> Any:  # noqa: ANN401 - Optuna's Trial, which has no type here
        import optuna

        trial_id = self.study._storage.get_trial_id_from_study_id_trial_number(
            self.study._study_id, number
        )
        return optuna.Trial(self.study, trial_id)

    def _patiently(self, action: Callable[[], Result]) -> Result:
        """Tries again while the storage fails, as on a full disk: what it does not know of now
        would be trained a second time."""
        until = time.monotonic() + PATIENCE_S
        pause = 0.5
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    return action()
                except storage.errors() as error:
                    if time.monotonic() > until:
                        raise
                    if pause < 1:
                        # Optuna's own error says nothing of what the database has said.
                        why = str(error.__cause__ or error).partition("\n")[0]
                        why = self.address.hidden(why) if self.address else why
                        say(escaped(f"note    the study cannot be written ({why}): trying again"))
            time.sleep(pause)
            pause = min(2 * pause, 10.0)


class _Noting:
    """A storage that keeps what a pruner would write into it."""

    def __init__(self, storage: BaseStorage, notes: dict[str, Any]) -> None:
        self._own = storage
        self._notes = notes

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the storage's own
        return getattr(self._own, name)

    def set_trial_system_attr(self, _trial_id: int, key: str, value: object) -> None:
        self._notes[key] = value


def _other(theirs: object, mine: str) -> str:
    """In what a study that was described before differs from the one that is asked for now."""
    try:
        before = [{*map(str, each)} for each in json.loads(str(theirs))]
    except (ValueError, TypeError):
        before = []
    if len(before) != 3:
        return "other spaces, settings or objectives"
    settings, spaces, objectives = before
    new_settings, new_spaces, new_objectives = map(set, json.loads(mine))
    found = []
    if spaces != new_spaces:
        keys = {key for each in spaces ^ new_spaces for key in KEY_OF_SPACE.findall(each)}
        found.append(f"another space of {', '.join(sorted(keys))}")
    if settings != new_settings:
        found.append(f"other settings ({_change(settings, new_settings)})")
    if objectives != new_objectives:
        found.append(f"other objectives ({_change(objectives, new_objectives)})")
    return redact(", and ".join(found))


def _change(before: set[str], now: set[str]) -> str:
    gone = ", ".join(sorted(before - now)) or "nothing"
    come = ", ".join(sorted(now - before)) or "nothing"
    return f"{gone} then, {come} now"


def sampler_problems(name: str, spaces: Sequence[Space]) -> Iterator[Problem]:
    """Why a sampler cannot search these spaces."""
    if name == "grid":
        endless = [space.key for space in spaces if space.listed is None]
        counts = [len(space.listed or ()) for space in spaces]
        if endless:
            yield Problem(
                "--sampler grid",
                what=(
                    f"{', '.join(endless)} has no values that can be listed: "
                    "an interval has no step"
                ),
                remedy=f"{endless[0]}=range(1,9) or {endless[0]}=a,b, or --sampler qmc",
                code="conflict",
            )
        elif math.prod(counts) > MOST_POINTS:
            yield Problem(
                "--sampler grid",
                what=f"the grid has {math.prod(counts):,} points",
                remedy="--sampler qmc",
                code="out-of-range",
            )
    if name == "cmaes":
        chosen = [space.key for space in spaces if space.choices]
        if chosen:
            yield Problem(
                "--sampler cmaes",
                what=f"searches numbers, and {', '.join(chosen)} is a choice",
                remedy="--sampler tpe",
                code="conflict",
            )
        if importlib.util.find_spec("cmaes") is None:
            yield Problem(
                "--sampler cmaes",
                what="needs the package cmaes",
                remedy=install("cmaes"),
                code="not-installed",
            )


def _grid(spaces: Sequence[Space]) -> list[tuple[Value, ...]]:
    return [*itertools.product(*(space.listed or [] for space in spaces))]


def _sampler(name: str, seed: int | None) -> BaseSampler:
    from optuna import samplers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about options that Optuna calls experimental
        if name == "cmaes":
            return samplers.CmaEsSampler(seed=seed)
        if name == "qmc":
            return samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)
        if name in ("random", "grid"):
            return samplers.RandomSampler(seed=seed)
        if name == "tpe":
            return samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
    raise ValueError(f"there is no sampler {name!r}")
