"""The engine that proposes values: Optuna, and a study in a file or behind an address.

Only the command that searches talks to it. The file is Optuna's journal, one line for each change,
so that other tools (optuna-dashboard) read it meanwhile.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import random
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from distdl.runs.directory import shown
from distdl.tools.search.objectives import Objective
from distdl.tools.search.spaces import Searched, Space, Value
from distdl.util.errors import Problem, UserError
from distdl.util.extras import install
from distdl.util.redact import redact
from distdl.util.screen import say

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

JOURNAL = "study.journal"
SAMPLERS = ("tpe", "random", "grid", "qmc", "cmaes")
# Attributes of the study and of its trials.
SEARCHED = "distdl.searched"
SEED = "distdl.seed"
RUN = "distdl.run"
KEY = "distdl.key"
DIRECTIONS: Mapping[str, Literal["maximize", "minimize"]] = {"max": "maximize", "min": "minimize"}
LOCK_S = 5  # after which a lock is taken for one of a process that was killed
PATIENCE_S = 300.0  # for which a storage may fail
MOST_POINTS = 1_000_000  # of a grid

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
        folder: Of the study's file, unless `storage` is an address that Optuna knows.
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
        storage: str | None = None,
        pruner: Callable[[], BasePruner] | None = None,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.searched = searched
        self.place = redact(storage) if storage else shown(folder / JOURNAL)
        self.objectives = objectives
        self.spaces = {space.key: space.distribution() for space in searched.spaces}
        self.grid = _grid(searched.spaces) if sampler == "grid" else None
        self.study: Study = _opened(
            lambda: optuna.create_study(
                storage=storage or _journal(folder / JOURNAL),
                study_name=name,
                directions=[DIRECTIONS[each.mode] for each in objectives],
                load_if_exists=True,
                pruner=pruner() if pruner else optuna.pruners.NopPruner(),
            ),
            storage,
        )
        self._refuse_another()
        if self.study.user_attrs.get(SEED) is None:
            self.study.set_user_attr(SEED, seed)
        self.seed: int | None = self.study.user_attrs.get(SEED)
        if self.study.user_attrs.get(KEY) is None:
            self.study.set_user_attr(KEY, uuid.uuid4().hex)
        self.key = str(self.study.user_attrs[KEY])  # by which trackers know the study
        # A sampler has no memory of its own: with the seed alone it would propose its first values
        # again when a search goes on.
        begun = len(self.study.get_trials(deepcopy=False))
        moved = None if self.seed is None else self.seed + begun
        self.study.sampler = _sampler(sampler, moved)

    def _refuse_another(self) -> None:
        directions = [str(each) for each in self.objectives]
        spaces = sorted(repr(space) for space in self.searched.spaces)
        mine = json.dumps([sorted(self.searched.fixed), spaces, directions])
        theirs = self.study.user_attrs.get(SEARCHED)
        if theirs is None:
            self.study.set_user_attr(SEARCHED, mine)
        elif theirs != mine:
            what = f"the study {self.study.study_name} has other spaces, settings or objectives"
            raise UserError.at("name", what, "choose another name=STUDY", code="mismatch")

    @property
    def count(self) -> int | None:
        """How many different trials there can be; None: no end."""
        return None if self.grid is None else len(self.grid)

    def known(self) -> list[Proposal]:
        """All trials so far, by their numbers. One that was proposed only in part, by a command
        that was killed, is told as failed."""
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
            elif not trial.state.is_finished():
                self.study.tell(trial.number, state=TrialState.FAIL)
        return found

    def propose(self) -> Proposal:
        """The values of a new trial."""
        return self._patiently(self._propose)

    def _propose(self) -> Proposal:
        if self.grid is not None:
            self._enqueue_next()
        trial = self.study.ask(self.spaces)
        return Proposal(trial.number, trial.params)

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
        """Tells the value of a validation, counted from 1; whether the trial is to be pruned."""

        def tell() -> bool:
            trial = self._trial(number)
            trial.report(value, validation)
            return trial.should_prune()

        return self._patiently(tell)

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
                except _storage_errors() as error:
                    if time.monotonic() > until:
                        raise
                    if pause < 1:
                        say(f"note    the study cannot be written ({error}): trying again")
            time.sleep(pause)
            pause = min(2 * pause, 10.0)


def _storage_errors() -> tuple[type[Exception], ...]:
    from optuna.exceptions import StorageInternalError

    return (OSError, StorageInternalError)


def _opened(create: Callable[[], Study], storage: str | None) -> Study:
    """
    Raises:
        UserError: The storage is none, or a study of that name has another number of objectives.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return create()
        except ValueError as error:  # of Optuna: the directions differ
            remedy = "choose another name=STUDY"
            raise UserError.at("name", str(error), remedy, code="mismatch") from error
        except Exception as error:  # a database's driver has its own errors, and may be missing
            if storage is None:
                raise
            what = f"cannot be used: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            remedy = "--storage sqlite:///FILE, or without it a file in the study's folder"
            raise UserError.at("--storage", what, remedy, code="unreachable") from error


def _journal(path: Path) -> BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    class WholeLines(JournalFileBackend):
        """Removes what a write left behind that was cut short, by a kill or a full disk: Optuna
        would take it for the beginning of the next line, and could not read the file again."""

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            _end_with_a_line(path)
            try:
                super().append_logs(logs)
            except OSError:
                with suppress(OSError):
                    _end_with_a_line(path)
                raise

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = JournalFileSymlinkLock(str(path), grace_period=LOCK_S)
    return JournalStorage(WholeLines(str(path), lock))


def _end_with_a_line(path: Path) -> None:
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end:
            start = max(0, end - 4096)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def sampler_problems(name: str, spaces: Sequence[Space]) -> Iterator[Problem]:
    """Why a sampler cannot search these spaces."""
    if name == "grid":
        endless = [space.key for space in spaces if space.listed is None]
        counts = [len(space.listed or ()) for space in spaces]
        if endless:
            what = f"{', '.join(endless)} has no values that can be listed: an interval has no step"
            remedy = f"{endless[0]}=range(1,9) or {endless[0]}=a,b, or --sampler qmc"
            yield Problem("--sampler grid", what, remedy, code="conflict")
        elif math.prod(counts) > MOST_POINTS:
            what = f"the grid has {math.prod(counts):,} points"
            yield Problem("--sampler grid", what, "--sampler qmc", code="out-of-range")
    if name == "cmaes":
        chosen = [space.key for space in spaces if space.choices]
        if chosen:
            what = f"searches numbers, and {', '.join(chosen)} is a choice"
            yield Problem("--sampler cmaes", what, "--sampler tpe", code="conflict")
        if importlib.util.find_spec("cmaes") is None:
            what = "needs the package cmaes"
            yield Problem("--sampler cmaes", what, install("cmaes"), code="not-installed")


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
        return samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
