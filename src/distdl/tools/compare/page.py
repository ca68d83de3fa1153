"""The page of a comparison: its tables, and the curves of its runs over each other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from distdl.runs.files import write_text
from distdl.tools.compare import screen
from distdl.tools.compare.comparison import Comparison
from distdl.tools.compare.facts import SPEED, ComparedRun
from distdl.tools.compare.limits import LimitResult
from distdl.tools.pages import data, plots
from distdl.tools.pages.data import MetricSeries
from distdl.tools.pages.parts import ReportFigure, ReportTable
from distdl.tools.pages.plots import Chart
from distdl.tools.pages.writing import mark_of, template
from distdl.util.colours import LINES
from distdl.util.errors import UserError

MOST_CURVES = len(LINES)  # runs in a chart, each with a colour of its own
MOST_CHARTS = 40
MOST_COLUMNS = 12  # runs whose values of a setting stand beside each other


def write(output: Path, comparison: Comparison, checked: Sequence[LimitResult], title: str) -> None:
    """Writes the page.

    Raises:
        UserError: The file cannot be written.
    """
    text = render(comparison, checked, title)
    try:
        write_text(output, text)
    except OSError as error:
        raise UserError.at(
            str(output),
            what=f"cannot be written: {error.strerror}",
            remedy="choose another: --output FILE",
            code="not-writable",
        ) from error


def render(comparison: Comparison, checked: Sequence[LimitResult], title: str) -> str:
    """The page; nothing in it refers to the network or to another file."""
    drawn = drawn_runs(comparison)
    figures = [ReportFigure(*plots.draw(chart, 0.0)) for chart in charts(comparison, drawn)]
    left_out = len(comparison.runs) - len(drawn)
    page = template("compare.html.jinja", Path(__file__).parent).render(
        mark=Markup(mark_of("compare")),
        title=title,
        now=time.strftime("%Y-%m-%d %H:%M:%S"),
        runs=_runs(comparison),
        differences=_differences(comparison),
        notes=[f"{name}: {text}" for name, text in screen.notes(comparison)],
        checked=[(each.passed, f"{each.name}: {each}") for each in checked],
        figures=figures[:MOST_CHARTS],
        drawn=f"the best {len(drawn)} of {len(comparison.runs)} runs" if left_out else "",
        more=max(0, len(figures) - MOST_CHARTS),
        damage=[text for run in comparison.runs for text in run.reported.damage],
    )
    return page.strip() + "\n"


def drawn_runs(comparison: Comparison) -> list[ComparedRun]:
    """The runs whose curves are drawn: the first, and the best of the others."""
    first, *others = comparison.runs
    if len(comparison.runs) <= MOST_CURVES:
        return [*comparison.runs]
    metric = comparison.metrics[0] if comparison.metrics else ""
    sign = 1 if comparison.mode(metric) == "min" else -1

    def place(run: ComparedRun) -> float:
        value = run.values.get(metric)
        return float("inf") if value is None or value != value else sign * value

    ranked = sorted((first, *others), key=place)
    return ranked[:MOST_CURVES]


def charts(comparison: Comparison, runs: Sequence[ComparedRun]) -> Iterator[Chart]:
    """A chart for each metric, with a line for each run."""
    logged = sorted({name for run in runs for name in run.reported.series})
    further = [n for n in logged if n.startswith(("train/", "lr")) or n == SPEED]
    for name in dict.fromkeys((*comparison.metrics, *further)):
        lines = {
            run.label: _present(name, run.reported.series[name])
            for run in runs
            if name in run.reported.series
        }
        unit = runs[0].reported.unit if name == SPEED else ""
        if lines:
            yield Chart(name, lines, unit)


def _present(name: str, series: MetricSeries) -> MetricSeries:
    """Without the values by which a metric says that it has none."""
    points = zip(series.steps, series.times, series.values, strict=True)
    kept = [point for point in points if not data.is_absent(name, point[2])]
    return MetricSeries(*map(list, zip(*kept, strict=True))) if kept else MetricSeries()


def _runs(comparison: Comparison) -> ReportTable:
    head = ("run", "label", "state", *comparison.metrics, "speed", "took", "devices", "cost")
    rows = []
    for number, run in enumerate(comparison.runs):
        values = (screen.value_text(run, name) for name in comparison.metrics)
        label = "" if run.label == run.name else run.label
        mark = ", best" if number == comparison.best else ""
        took = data.duration(run.seconds) if run.seconds else ""
        row = (
            run.name,
            label,
            f"{run.state}{mark}",
            *values,
            screen.speed_text(run),
            took,
            run.devices,
            screen.cost_text(run),
        )
        rows.append(row)
    return ReportTable("Runs", head, rows)


def _differences(comparison: Comparison) -> ReportTable:
    runs = comparison.runs
    if len(runs) <= MOST_COLUMNS:
        head = ("", *(run.label for run in runs))
        return ReportTable(
            "What differs", head, [(d.key, *d.texts) for d in comparison.differences]
        )
    columns, rows = screen.differences_table(comparison)
    return ReportTable("What differs", columns, rows)
