"""A comparison in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from distdl.tools.compare.comparison import Comparison, SeedSpread
from distdl.tools.compare.facts import COMMIT, DATA, ComparedRun
from distdl.tools.pages import data
from distdl.util import table
from distdl.util.screen import escaped, say
from distdl.util.wording import first_few, plural

MOST_METRICS = 3  # columns of the table; the page has all
BESIDE = 4  # runs whose values of one setting stand beside each other
MOST_VALUES = 4  # of a setting, if there are more runs
MOST_ROWS = 30  # of the differences
INDENT = 8  # characters of a note's name

# Why a fact may be unknown.
UNKNOWN_BECAUSE = {
    COMMIT: "started outside git or before the first commit",
    DATA: "of which no digest was recorded",
}

Row = tuple[str, ...]


def show(comparison: Comparison, *, complete: bool = False) -> None:
    """Prints the runs, what differs, and what the seed does. `complete`: all of what differs, as
    there is no page that has the rest."""
    table.show(*runs_table(comparison))
    say()
    if comparison.differences:
        columns, rows = differences_table(comparison)
        most = len(rows) if complete else MOST_ROWS
        table.show(columns, rows[:most])
        left = len(rows) - most
        if left > 0:
            say(f"{left} more {plural('difference', left)} on the page")
        say()
    for name, text in notes(comparison):
        print_note(name, text)


def print_note(name: str, text: str) -> None:
    """A sentence behind its label."""
    say(f"{name:{INDENT}}{escaped(text)}")


def runs_table(comparison: Comparison) -> tuple[Row, list[Row]]:
    """Columns and rows: a run each, the best one marked."""
    metrics = comparison.metrics[:MOST_METRICS]
    labelled = any(run.label != run.name for run in comparison.runs)
    first = "overrides" if labelled else "run"
    head = (first, "state", *metrics, "speed", "took", "devices", "cost", "run")
    rows = []
    for number, run in enumerate(comparison.runs):
        mark = ", best" if number == comparison.best else ""
        values = (value_text(run, metric) for metric in metrics)
        took = data.duration(run.seconds) if run.seconds else ""
        row = (
            run.label,
            f"{run.state.lower()}{mark}",
            *values,
            speed_text(run),
            took,
            run.devices,
            cost_text(run),
            run.name if labelled else "",
        )
        rows.append(row)
    return without_empty(head, rows)


def without_empty(head: Row, rows: Sequence[Row]) -> tuple[Row, list[Row]]:
    """The columns in which some row has a text."""
    used = [number for number in range(len(head)) if any(row[number] for row in rows)]
    return tuple(head[n] for n in used), [tuple(row[n] for n in used) for row in rows]


def differences_table(comparison: Comparison) -> tuple[Row, list[Row]]:
    """Columns and rows: a setting each. With many runs, how many values it has, and the first."""
    runs = comparison.runs
    rows: list[Row] = [(row.key, *row.texts) for row in comparison.differences]
    if len(runs) <= BESIDE:
        return ("differs", *(run.label for run in runs)), rows
    rows = []
    for row in comparison.differences:
        texts = [*dict.fromkeys(row.texts)]
        first = ", ".join(texts[:MOST_VALUES])
        more = ", ..." if len(texts) > MOST_VALUES else ""
        rows.append((row.key, f"{len(texts)} values", f"{first}{more}"))
    return ("differs", "", ""), rows


def notes(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """A word and a sentence each."""
    same = ", ".join(f"{key} {text}" for key, text in comparison.same)
    if same:
        yield "same", same
    for key, names in comparison.unknown.items():
        of = "all runs" if len(names) == len(comparison.runs) else first_few(names)
        yield "unknown", f"the {key} of {of}, {UNKNOWN_BECAUSE[key]}"
    if not comparison.differences:
        yield "same", "the settings of all runs, too: they should agree"
    for spread in comparison.seeds:
        yield "seed", seed_text(spread)
    if not comparison.seeds and comparison.metrics:
        what = "no two runs differ by the seed alone, so nobody knows what chance does to"
        yield "seed", f"{what} {comparison.metrics[0]}: -m seed=1,2,3"


def seed_text(spread: SeedSpread) -> str:
    """What the seed alone does, in a sentence."""
    count = len(spread.names)
    values = ", ".join(f"{value:.4g}" for value in spread.values[:6])
    what = "differ by" if count == 2 else "have a standard deviation of"
    more = ", ..." if count > 6 else ""
    return (
        f"{count} runs that differ by the seed alone {what} {spread.spread:.3g} in {spread.metric} "
        f"({values}{more}): less than that between other runs may be chance"
    )


def value_text(run: ComparedRun, metric: str) -> str:
    value = run.values.get(metric)
    return "" if value is None else data.shown_value(metric, value)


def speed_text(run: ComparedRun) -> str:
    return "" if math.isnan(run.speed) else f"{run.speed:,.0f} {run.reported.unit}"


def cost_text(run: ComparedRun) -> str:
    if not run.device_hours:
        return ""
    used = f"{run.device_hours:.3g} device-hours"
    if run.device_hours < 1:
        used = f"{60 * run.device_hours:.2g} device-minutes"
    return used if run.price is None else f"{used}, {run.price:.2f} USD"
