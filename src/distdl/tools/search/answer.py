"""A study for a program: the same as the table says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from distdl.runs.directory import shown
from distdl.tools.search.search import Search


@dataclass(frozen=True)
class SearchedTrial:
    """A trial, and its run."""

    number: int
    """From 0, as the engine counts."""
    overrides: str
    """Its values of the searched keys: `optimizer.lr=0.1 optimizer=sgd`."""
    end: str | None
    """COMPLETE, PRUNED or FAIL; null: it has not ended, and the same command goes on with it."""
    values: Sequence[float]
    """One for each objective; empty unless it is COMPLETE."""
    validations: Sequence[float]
    """The value of the first objective after each validation so far."""
    run: str
    """The run's folder."""
    repeats: int | None
    """The trial before it that has the same values, whose run is its own."""
    why: str
    """Why it failed; empty if it did not."""
    freed: int
    """Bytes of its checkpoints that this command has removed (`--pruned-checkpoints remove`)."""


@dataclass(frozen=True)
class Study:
    """A search, after its command has done what it can."""

    SCHEMA: ClassVar[str] = "study/1"

    study: str
    """The folder of its trials."""
    storage: str
    """Where the engine keeps it: a file, or an address."""
    objectives: Sequence[str]
    """Each with its direction: `val/acc1:max`."""
    trials: Sequence[SearchedTrial]
    best: int | None
    """The number of the best complete trial by the first objective; null if none is complete."""
    page: str | None
    """The HTML file; null if none was written."""
    again: str
    """The command that goes on with the search."""
    next: str
    """The command that trains with the best values for longer; empty if no trial is complete."""


def answer_of(search: Search, page: str | None, again: str, following: str) -> Study:
    """The answer of `distdl tune`."""
    best = search.best
    return Study(
        study=shown(search.folder),
        storage=search.engine.place,
        objectives=[str(objective) for objective in search.engine.objectives],
        trials=[
            SearchedTrial(
                number=trial.number,
                overrides=trial.text,
                end=trial.end,
                values=trial.results,
                validations=trial.curve.values,
                run=shown(trial.run.path),
                repeats=None if trial.repeats is None else trial.repeats.number,
                why=trial.why,
                freed=trial.freed,
            )
            for trial in search.trials
        ],
        best=None if best is None else best.number,
        page=page,
        again=again,
        next=following,
    )
