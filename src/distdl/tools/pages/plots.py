"""The curves of a report, as SVG text in the page's light or dark colours."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distdl.tools.pages.data import MetricSeries, is_absent
from distdl.util.colours import LINES
from distdl.util.screen import escaped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 600  # per line; more are averaged in buckets, with a band from minimum to maximum
MOST_LINES = 8  # of a chart of metrics whose names begin alike
# matplotlib draws in these colours, and the page replaces them with its own.
TEXT, GRID = "#123456", "#654321"
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: searchable, in the page's font
    "svg.hashsalt": "distdl",  # makes equal pages identical
    "text.parse_math": False,  # a metric may be named a$b$
    "font.size": 11.0,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT),
    **dict.fromkeys(("axes.edgecolor", "axes.titlecolor"), TEXT),
}


@dataclass
class Chart:
    """One chart with its axes."""

    title: str
    lines: dict[str, MetricSeries]  # by label
    unit: str = ""  # the label of the vertical axis
    scale: float = 1.0  # values are multiplied by this
    by_time: bool = False  # over minutes since the start instead of optimizer steps
    # A metric on its own axis at the right: label, series, unit, scale.
    second: tuple[str, MetricSeries, str, float] | None = None


def charts(series: dict[str, MetricSeries], unit: str) -> list[Chart]:
    """Assigns every metric to one chart by its name: known metrics first, then the user's own, by
    prefix. `unit` is the unit of the throughput."""
    # The single points of a benchmark have their own section.
    names = [n for n in sorted(series) if not re.match(r"epoch$|val/samples$|benchmark/", n)]
    system = [n for n in names if n.startswith("system/")]
    left = [n for n in names if n not in system]
    result: list[Chart] = []

    def take(
        title: str,
        pattern: str,
        unit: str = "",
        scale: float = 1.0,
        by_time: bool = False,
        second: tuple[str, MetricSeries, str, float] | None = None,
    ) -> None:
        lines = {name: series[name] for name in left if re.match(pattern, name)}
        if lines:
            result.append(Chart(title, lines, unit, scale, by_time, second))
            left[:] = [name for name in left if name not in lines]

    take("Loss", r"(train|val)/loss$")
    accuracies = [v for n in left if n.startswith("val/acc") for v in series[n].values]
    fractions = all(0 <= v <= 1 for v in accuracies if v == v)
    if fractions:
        take("Accuracy", r"val/acc", unit="%", scale=100.0)
    else:
        take("Accuracy", r"val/acc")
    second = None
    if {"perf/images_per_second", "perf/data_wait"} <= set(left):
        left.remove("perf/data_wait")
        second = ("data_wait (right)", series["perf/data_wait"], "% of the time", 100.0)
    take("Throughput", r"perf/images_per_second$", unit=unit, second=second)
    take("data_wait", r"perf/data_wait$", unit="% of the time", scale=100.0)
    take("Learning rate", r"lr$|lr[-/]")
    take("Device memory", r"perf/memory_gib$", unit="GiB")
    for prefix in dict.fromkeys(name.split("/")[0] for name in left):
        alike = [name for name in left if name.split("/")[0] == prefix]
        for title, members in split(prefix, alike):
            result.append(Chart(title, {name: series[name] for name in members}))
    left = system
    for title, part, of in (
        ("Processor, memory, disk", "(cpu|memory|disk)_percent", "%"),
        ("GPU", r"gpu\d+_percent", "%"),
        ("GPU memory", r"gpu\d+_memory_gib", "GiB"),
        ("GPU power", r"gpu\d+_power_watts", "W"),
        ("Network", r"network_\w+", "MB/s"),
        ("Memory", "memory_gib", "GiB"),
        ("Other system metrics", ".*", ""),
    ):
        take(title, rf"system/(node\d+/)?{part}$", unit=of, by_time=True)
    return result


def split(title: str, names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Charts of metrics whose names begin with `title`: of many ones, a chart for each next word
    that several of them share (`val/box_ap50`, `val/box_ap75`: `val/box_ap`), and one of the rest.
    """
    if len(names) <= MOST_LINES:
        yield title, [*names]
        return
    following = re.compile(re.escape(title) + r"[^A-Za-z0-9]*([A-Za-z]+|[0-9]+)")
    words: dict[str, list[str]] = {}
    for name in names:
        match = following.match(name)
        words.setdefault(match[0] if match else "", []).append(name)
    several = {word: members for word, members in words.items() if word and len(members) > 1}
    rest = [name for name in names if not any(name in each for each in several.values())]
    if rest or not several:
        yield title, rest or [*names]
    for word, members in several.items():
        yield from split(word, members)


@contextmanager
def picture(title: str, height: float) -> Iterator[tuple[Axes, Callable[[], str]]]:
    """Axes to draw on, and a function that returns them as an `<svg>` element."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from cycler import cycler

    style = {**STYLE, "axes.prop_cycle": cycler(color=LINES)}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(6.4, height), layout="constrained")
        axes.set_title(escaped(title), loc="left")

        def finish() -> str:
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
            return _for_page(buffer.getvalue(), title)

        try:
            yield axes, finish
        finally:
            plt.close(figure)


def draw(chart: Chart, start: float) -> tuple[str, list[tuple[str, str]]]:
    """One `<svg>` element, and its legend as (label, colour) for HTML, where text wraps, unlike in
    SVG. `start` is time zero, in seconds since 1970."""
    times_from = start if chart.by_time else None
    with picture(chart.title, height=3.2) as (axes, finish):
        for label, series in chart.lines.items():
            _line(axes, label, series, times_from, chart.scale)
        axes.set_xlabel("minutes since the start" if chart.by_time else "optimizer step")
        axes.set_ylabel(chart.unit)
        drawn = list(axes.get_lines())
        if chart.second:
            label, series, unit, scale = chart.second
            right = axes.twinx()
            right.set_prop_cycle(color=LINES[len(drawn) :])
            _line(right, label, series, times_from, scale)
            right.set_ylabel(unit)
            right.set_ylim(bottom=0)
            right.grid(False)
            right.spines["right"].set_visible(True)
            drawn += right.get_lines()
        if chart.unit or chart.second:
            low, high = axes.get_ylim()
            axes.set_ylim(min(0.0, low), high + 0.05 * abs(high))
        axes.locator_params(axis="x", nbins=6)
        return finish(), [(str(line.get_label()), str(line.get_color())) for line in drawn]


def draw_curves(
    title: str, lines: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str
) -> tuple[str, list[tuple[str, str]]]:
    """Points (x, y) of each line over the axes `across` and `up`: an `<svg>` element, and its
    legend as `draw` gives it."""
    with picture(title, height=3.2) as (axes, finish):
        for label, points in lines.items():
            x, y = zip(*points, strict=True) if points else ((), ())
            axes.plot(x, y, label=label, linewidth=1.4)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        drawn = list(axes.get_lines())
        return finish(), [(str(line.get_label()), str(line.get_color())) for line in drawn]


# Beyond it, matplotlib's own arithmetic overflows.
LARGEST = 1e100


def _line(
    axes: Axes, label: str, series: MetricSeries, times_from: float | None, scale: float
) -> None:
    """Draws over minutes since `times_from`, or over optimizer steps if that is None."""
    x = np.array(series.steps, dtype=float)
    if times_from is not None:
        x = (np.array(series.times) - times_from) / 60
    y = np.array(series.values, dtype=float)
    absent = np.array([is_absent(label, value) for value in series.values], dtype=bool)
    hidden = ~(np.abs(y) <= LARGEST)  # NaN, too
    y[hidden | absent] = math.nan
    y *= scale
    for left_out, why in (
        (absent, "-1: there is no such object"),
        (hidden, "NaN, infinite or too large to draw"),
    ):
        if left_out.any():
            label += f" ({left_out.sum()} of {len(y)} values are {why})"
    size = math.ceil(len(y) / POINTS)
    if size == 1:
        marker = "o" if len(y) < 40 else ""
        axes.plot(x, y, label=label, marker=marker, markersize=3, linewidth=1.4)
        return
    # A row for each bucket; the last one is padded with NaN.
    filled = [np.append(each, [math.nan] * (-len(y) % size)).reshape(-1, size) for each in (x, y)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about buckets of NaN only
        x, mean = (np.nanmean(each, axis=1) for each in filled)
        low = np.nanmin(filled[1], axis=1)
        high = np.nanmax(filled[1], axis=1)
    (drawn,) = axes.plot(x, mean, label=label, linewidth=1.4)
    axes.fill_between(x, low, high, color=drawn.get_color(), alpha=0.18, linewidth=0)


def _for_page(svg: str, title: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(TEXT, "currentColor").replace(GRID, "var(--grid)")
    # An id must be unique in a page, but matplotlib repeats its ids in each picture.
    name = re.sub(r"\W", "", title)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    size = r'width="[\d.]+pt" height="[\d.]+pt"'
    return re.sub(size, f'role="img" aria-label="{name}"', svg, count=1)
