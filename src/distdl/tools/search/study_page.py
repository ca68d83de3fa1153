"""The page of a study: one file that needs no network, also of a thousand trials."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from distdl.runs.directory import shown
from distdl.runs.files import write_text
from distdl.tools.pages.parts import ReportFigure, ReportTable
from distdl.tools.pages.plots import LARGEST, picture
from distdl.tools.pages.writing import mark_of, output_of, template
from distdl.tools.search.engine import TrialEnd
from distdl.tools.search.search import Search
from distdl.tools.search.spaces import Space
from distdl.tools.search.trials import SearchTrial
from distdl.util.colours import LINES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VERB = "tune"
HEIGHT = 3.2
BEST, OTHER, PRUNED = LINES[0], LINES[7], LINES[1]
LEAST_FOR_IMPORTANCE = 8  # complete trials


def write(search: Search) -> str:
    """Writes the page into the study's folder, and returns its path.

    Raises:
        UserError: A file of that name is not this page.
        OSError: It cannot be written.
    """
    output = output_of(None, search.folder, VERB)
    write_text(output, render(search))
    return shown(output)


def render(search: Search) -> str:
    """The page; nothing in it refers to the network or to another file."""
    trials = [trial for trial in search.trials if trial.repeats is None]
    page = template("study.html.jinja", Path(__file__).parent).render(
        mark=Markup(mark_of(VERB)),
        title=f"study {search.folder.name}",
        now=time.strftime("%Y-%m-%d %H:%M:%S"),
        facts=_facts(search),
        spaces=ReportTable("Spaces", ("key", "values"), _space_rows(search)),
        figures=[*_figures(search, trials)],
        importance=_importance(search),
        unimportant=f"from {LEAST_FOR_IMPORTANCE} complete trials on, with one objective",
        trials=_table(search, trials),
    )
    return page.strip() + "\n"


def _facts(search: Search) -> list[str]:
    best = search.best
    found = [f"searched for {', '.join(map(str, search.engine.objectives))}"]
    if best is not None:
        found.append(f"best: {_number(best.results[0])}, trial {best.number}: {best.text}")
    return found


def _space_rows(search: Search) -> list[tuple[str, str]]:
    return [(space.key, str(space)) for space in search.searched.spaces]


def _table(search: Search, trials: Sequence[SearchTrial]) -> ReportTable:
    names = [each.metric for each in search.engine.objectives]
    spaces = search.searched.spaces
    head = ("trial", "end", *names, "validations", *(space.key for space in spaces), "run", "why")
    rows = []
    for trial in trials:
        results = [_number(value) for value in trial.results] or [""] * len(names)
        varied = [space.text(trial.proposal.values[space.key]) for space in spaces]
        mark = ", best" if trial is search.best else ""
        word = "open" if trial.end is None else trial.end.lower()
        row = (
            str(trial.number),
            f"{word}{mark}",
            *results,
            str(len(trial.curve.values)),
            *varied,
            trial.run.path.name,
            trial.why,
        )
        rows.append(row)
    return ReportTable("Trials", head, rows)


def _figures(search: Search, trials: Sequence[SearchTrial]) -> Iterator[ReportFigure]:
    metric = search.objective.metric
    if any(trial.curve.values for trial in trials):
        yield _curves(trials, search.best, metric)
    valued = [trial for trial in trials if not math.isnan(_value_of(trial))]
    if not valued:
        return
    yield _history(search, valued)
    for space in search.searched.spaces:
        yield _slice(space, valued, metric)
    if len(search.searched.spaces) > 1:
        yield _parallel(search, valued)
    if len(search.engine.objectives) > 1:
        yield _front(search)


def _value_of(trial: SearchTrial) -> float:
    """By the first objective; of a trial without a result its last validation. NaN: none."""
    if trial.results:
        return _drawable(trial.results[0])
    return _drawable(trial.curve.values[-1]) if trial.curve.values else math.nan


def _drawable(value: float) -> float:
    return value if abs(value) <= LARGEST else math.nan


def _number(value: float) -> str:
    return f"{value:.5g}"


def _curves(trials: Sequence[SearchTrial], best: SearchTrial | None, metric: str) -> ReportFigure:
    """A line for each trial; matplotlib writes them as paths without markers."""
    from matplotlib.collections import LineCollection

    lines = {id(each): _points(each) for each in trials if each.curve.values}
    with picture(f"{metric} after each validation", HEIGHT) as (axes, finish):
        others = [points for key, points in lines.items() if best is None or key != id(best)]
        axes.add_collection(LineCollection(others, colors=OTHER, linewidths=0.7, alpha=0.5))
        singles = np.array([points[0] for points in others if len(points) == 1]).reshape(-1, 2)
        axes.plot(singles[:, 0], singles[:, 1], ".", color=OTHER, markersize=2, alpha=0.6)
        if best is not None and id(best) in lines:
            points = lines[id(best)]
            axes.plot(points[:, 0], points[:, 1], color=BEST, linewidth=2)
        axes.autoscale_view()
        axes.set_xlabel("validation")
        axes.locator_params(axis="x", integer=True)
        return ReportFigure(finish(), [("the best trial", BEST), ("another trial", OTHER)])


def _points(trial: SearchTrial) -> np.ndarray:
    values = [_drawable(value) for value in trial.curve.values]
    return np.column_stack((np.arange(1, len(values) + 1), values))


def _history(search: Search, trials: Sequence[SearchTrial]) -> ReportFigure:
    with picture("History", HEIGHT) as (axes, finish):
        _scatter(axes, [trial.number for trial in trials], trials)
        done = [trial for trial in trials if trial.end is TrialEnd.COMPLETE]
        best = np.maximum if search.objective.mode == "max" else np.minimum
        values = [_value_of(trial) for trial in done]
        if values:
            numbers = [trial.number for trial in done]
            axes.step(numbers, best.accumulate(values), where="post", color=BEST)
        axes.set_xlabel("trial")
        axes.locator_params(axis="x", integer=True)
        axes.set_ylabel(search.objective.metric)
        return ReportFigure(finish(), [("best so far", BEST), *_kinds(trials)])


def _scatter(axes: Axes, across: Sequence[float], trials: Sequence[SearchTrial]) -> None:
    values = np.array([_value_of(trial) for trial in trials])
    places = np.array(across, dtype=float)
    is_complete = np.array([trial.end is TrialEnd.COMPLETE for trial in trials])
    for chosen, colour in ((is_complete, OTHER), (~is_complete, PRUNED)):
        axes.plot(places[chosen], values[chosen], ".", color=colour, markersize=5, alpha=0.7)


def _kinds(trials: Sequence[SearchTrial]) -> list[tuple[str, str]]:
    kinds = [("complete", OTHER)]
    if any(trial.end is not TrialEnd.COMPLETE for trial in trials):
        kinds.append(("pruned, or open: its last validation", PRUNED))
    return kinds


def _slice(space: Space, trials: Sequence[SearchTrial], metric: str) -> ReportFigure:
    from matplotlib.ticker import NullFormatter

    with picture(space.key, HEIGHT) as (axes, finish):
        _scatter(axes, [_place(space, trial) for trial in trials], trials)
        if space.choices:
            axes.set_xticks(range(len(space.choices)), space.choices)
        elif space.log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel(metric)
        return ReportFigure(finish(), _kinds(trials))


def _place(space: Space, trial: SearchTrial) -> float:
    """Where a value stands on its axis: a choice by its position."""
    value = trial.proposal.values[space.key]
    if space.choices:
        return float(space.choices.index(str(value)))
    assert isinstance(value, int | float)
    return float(value)


def _share(space: Space, trial: SearchTrial) -> float:
    """The same from 0 to 1."""
    place = _place(space, trial)
    if space.choices:
        return place / (len(space.choices) - 1)
    low, high = space.low, space.high
    if space.log:
        place, low, high = math.log(place), math.log(low), math.log(high)
    return (place - low) / (high - low)


def _parallel(search: Search, trials: Sequence[SearchTrial]) -> ReportFigure:
    """Parallel coordinates: a line for each trial, which is the stronger the better it is."""
    from matplotlib.collections import LineCollection

    spaces = search.searched.spaces
    values = np.array([_value_of(trial) for trial in trials])
    low, high = values.min(), values.max()
    heights = (values - low) / (high - low) if high > low else np.full(len(values), 0.5)
    strengths = heights if search.objective.mode == "max" else 1 - heights
    order = np.argsort(strengths, kind="stable")
    rows = [[*(_share(space, trial) for space in spaces)] for trial in trials]
    across = np.arange(len(spaces) + 1)
    lines = [np.column_stack((across, [*rows[n], heights[n]])) for n in order]
    with picture("Parallel coordinates", HEIGHT) as (axes, finish):
        alphas = 0.08 + 0.72 * strengths[order] ** 4
        axes.add_collection(LineCollection(lines, colors=BEST, linewidths=0.9, alpha=alphas))
        names = [*(space.key for space in spaces), search.objective.metric]
        axes.set_xticks(across, names, rotation=15, ha="right")
        ends = [*(_ends(space) for space in spaces), (_number(low), _number(high))]
        for place, (bottom, top) in enumerate(ends):
            axes.text(place, -0.02, bottom, ha="center", va="top", fontsize=8)
            axes.text(place, 1.02, top, ha="center", va="bottom", fontsize=8)
        axes.set_ylim(-0.12, 1.12)
        axes.set_xlim(-0.3, len(spaces) + 0.3)
        axes.set_yticks([])
        return ReportFigure(finish(), [("a trial: the better, the stronger", BEST)])


def _ends(space: Space) -> tuple[str, str]:
    return space.text(space.first), space.text(space.others[-1])


def _front(search: Search) -> ReportFigure:
    """Two objectives against each other."""
    first, second = search.engine.objectives[:2]
    with picture("Objectives", HEIGHT) as (axes, finish):
        points = np.array([trial.results[:2] for trial in search.complete]).reshape(-1, 2)
        axes.plot(points[:, 0], points[:, 1], ".", color=OTHER)
        axes.set_xlabel(first.metric)
        axes.set_ylabel(second.metric)
        return ReportFigure(finish(), [("complete", OTHER)])


def _importance(search: Search) -> ReportTable:
    """How much of what tells good trials from the others each key explains (PED-ANOVA, Watanabe et
    al., IJCAI 2023); without rows if there are too few trials."""
    rows: list[tuple[str, str]] = []
    if len(search.engine.objectives) == 1 and len(search.complete) >= LEAST_FOR_IMPORTANCE:
        shares = search.engine.importances()
        rows = [(key, f"{100 * share:.0f} %") for key, share in shares.items()]
    return ReportTable("Importance", ("key", "share"), rows)
