"""The curves of a report, as SVG text that follows the page's light or dark colours."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distdl.commands._report_data import Series

POINTS = 600  # per line; more are averaged in buckets, with a band from the least to the greatest
# Stand-ins that matplotlib draws with and the page then colours.
TEXT, GRID = "#123456", "#654321"
LINES = ["#2f7ed8", "#e8743b", "#19a979", "#945ecf", "#d64577", "#848f1a", "#0f9ba8", "#8a6d3b"]


STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's font
    "svg.hashsalt": "distdl",
    "text.parse_math": False,  # a metric may be called a$b$
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
    """One pair of axes.

    Args:
        title: What stands above it.
        lines: Label to metric.
        unit: The label of the vertical axis.
        scale: Values are multiplied by this.
        by_time: Minutes since the start instead of optimizer steps.
        second: A metric on an axis of its own, at the right: label, series, unit, scale.
    """

    title: str
    lines: dict[str, Series]
    unit: str = ""
    scale: float = 1.0
    by_time: bool = False
    second: tuple[str, Series, str, float] | None = None


def charts(series: dict[str, Series], unit: str) -> list[Chart]:
    """Every metric in one chart: those that are known first, then the user's own, by prefix.

    Args:
        series: By name.
        unit: Of the throughput.
    """
    left = {k: v for k, v in sorted(series.items()) if k not in ("epoch", "val/samples")}
    # Single points, which have a section of their own.
    left = {k: v for k, v in left.items() if not k.startswith("benchmark/")}
    system = {k: left.pop(k) for k in list(left) if k.startswith("system/")}
    found: list[Chart] = []

    def take(title: str, test: Callable[[str], bool], **options: Any) -> None:
        lines = {k: left.pop(k) for k in list(left) if test(k)}
        if lines:
            found.append(Chart(title, lines, **options))

    take("Loss", lambda k: k in ("train/loss", "val/loss"))
    percent = [v for k, v in left.items() if k.startswith("val/acc")]
    is_fraction = all(0 <= x <= 1 for s in percent for x in s.values if x == x)
    options: dict[str, Any] = {"unit": "%", "scale": 100.0} if is_fraction else {}
    take("Accuracy", lambda k: k.startswith("val/acc"), **options)
    wait = left.get("perf/data_wait")
    if "perf/images_per_second" in left and wait:
        del left["perf/data_wait"]
        second = ("data_wait (right)", wait, "% of the time", 100.0)
        take("Throughput", lambda k: k == "perf/images_per_second", unit=unit, second=second)
    take("Throughput", lambda k: k == "perf/images_per_second", unit=unit)
    take("data_wait", lambda k: k == "perf/data_wait", unit="% of the time", scale=100.0)
    take("Learning rate", _matches(r"lr$|lr[-/]"))
    take("Device memory", lambda k: k == "perf/memory_gib", unit="GiB")
    for prefix in dict.fromkeys(_prefix(k) for k in left):
        take(prefix, _has_prefix(prefix))
    left = system
    for title, part, of in (
        ("Processor, memory, disk", ("cpu_percent", "memory_percent", "disk_percent"), "%"),
        ("GPU", (r"gpu\d+_percent",), "%"),
        ("GPU memory", (r"gpu\d+_memory_gib",), "GiB"),
        ("GPU power", (r"gpu\d+_power_watts",), "W"),
        ("Network", (r"network_\w+",), "MB/s"),
        ("Memory", ("memory_gib",), "GiB"),
        ("Other system metrics", (".*",), ""),
    ):
        pattern = rf"system/(node\d+/)?({'|'.join(part)})$"
        take(title, _matches(pattern), unit=of, by_time=True)
    return found


def _prefix(name: str) -> str:
    return name.split("/")[0] if "/" in name else name


def _has_prefix(prefix: str) -> Callable[[str], bool]:
    return lambda name: _prefix(name) == prefix


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda name: re.match(pattern, name) is not None


def draw(chart: Chart, start: float) -> tuple[str, list[tuple[str, str]]]:
    """One `<svg>` element, and its legend as (label, colour): text wraps in HTML, not in SVG.

    Args:
        chart: What to draw.
        start: Time zero, in seconds since 1970.
    """
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from cycler import cycler

    style: Any = {
        **STYLE,
        "svg.hashsalt": chart.title,  # else no two pages are alike
        "axes.prop_cycle": cycler(color=LINES),
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
        try:
            for label, series in chart.lines.items():
                _line(axes, label, series, chart, start, chart.scale)
            axes.set_title(chart.title, loc="left")
            axes.set_xlabel("minutes since the start" if chart.by_time else "optimizer step")
            axes.set_ylabel(chart.unit)
            drawn = list(axes.get_lines())
            if chart.second:
                label, series, unit, scale = chart.second
                right = axes.twinx()
                right.set_prop_cycle(color=LINES[len(drawn) :])
                _line(right, label, series, chart, start, scale)
                right.set_ylabel(unit)
                right.set_ylim(bottom=0)
                right.grid(False)
                right.spines["right"].set_visible(True)
                drawn += right.get_lines()
            if chart.unit or chart.second:
                low, high = axes.get_ylim()
                axes.set_ylim(min(0.0, low), high + 0.05 * abs(high))
            axes.locator_params(axis="x", nbins=6)
            legend = [(str(line.get_label()), str(line.get_color())) for line in drawn]
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        finally:
            plt.close(figure)
    return _for_page(buffer.getvalue(), chart.title), legend


def _line(axes: Any, label: str, series: Series, chart: Chart, start: float, scale: float) -> None:
    x = [(t - start) / 60 for t in series.times] if chart.by_time else [*map(float, series.steps)]
    y = [scale * v if math.isfinite(v) else math.nan for v in series.values]
    low = high = y
    if len(y) > POINTS:
        x, y, low, high = _bucketed(x, y)
    marker = "o" if len(y) < 40 else ""
    (drawn,) = axes.plot(x, y, label=label, marker=marker, markersize=3, linewidth=1.4)
    if low is not y:
        axes.fill_between(x, low, high, color=drawn.get_color(), alpha=0.18, linewidth=0)


def _bucketed(
    x: list[float], y: list[float]
) -> tuple[list[float], list[float], list[float], list[float]]:
    size = math.ceil(len(y) / POINTS)
    out: tuple[list[float], list[float], list[float], list[float]] = ([], [], [], [])
    for i in range(0, len(y), size):
        values = [v for v in y[i : i + size] if v == v] or [math.nan]
        mean = sum(values) / len(values)
        at = x[i : i + size]
        for column, v in zip(out, (sum(at) / len(at), mean, min(values), max(values)), strict=True):
            column.append(v)
    return out


def _for_page(svg: str, title: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(TEXT, "currentColor").replace(GRID, "var(--grid)")
    # One id may be used once in a page; matplotlib begins anew in each picture.
    name = re.sub(r"\W", "", title)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg)
    if size:
        svg = svg.replace(size.group(0), f'role="img" aria-label="{name}"', 1)
    return svg
