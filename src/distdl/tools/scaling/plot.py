"""Plots efficiency over devices: measured, predicted, and Azure's published numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdl.tools.scaling import published
from distdl.tools.scaling.results import ScalingRow
from distdl.util.colours import LINES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY = "#8a94a0"
TOP = 108.0  # per cent: the least end of the axis
GAP = 4.2  # per cent between two labels
FAR = 6.0  # if the axis ends beyond this many times the published devices, labels fit inside it
DOTS = (0, (1, 5))
# relpos: the line starts at the beginning of the name, not at its end.
ARROW = {"arrowstyle": "-", "relpos": (0.0, 0.5), "linewidth": 0.6, "linestyle": DOTS}
ARROW["color"] = GREY


def draw(
    path: Path,
    rows: Sequence[ScalingRow],
    further: dict[str, dict[int, float]],
    title: str,
    published_too: bool,
) -> None:
    """Writes a PNG of the measured rows that have an efficiency.

    Args:
        further: Strategy to devices to the predicted efficiency of further sizes (weak scaling).
        published_too: Whether to show Azure's numbers, which are for ResNet-50.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style: Any = {
        "font.size": 11.0,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#dfe4ea",
        "grid.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.005, 0.985, 0.99))  # not to the very edge
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(11.0, 7.0), layout=layout)
        try:
            ends = references(axes) if published_too else []
            counts = measured(axes, rows) | predicted(axes, rows, further)
            most = max([*counts, *(int(last) for last, _, _ in ends)])
            ticks = [2**i for i in range(most.bit_length()) if 2**i <= most]
            ticks = sorted({*ticks, *counts}) if len(ticks) < 8 else ticks
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
            axes.minorticks_off()
            axes.set_xlim(0.93, most * 1.07)
            # Do not cut off efficiencies above 100 % (caches, or a machine that was busy).
            axes.set_ylim(0, max(TOP, 1.04 * axes.dataLim.y1))
            if ends:
                label_right(axes, ends)
            axes.set_xlabel("devices")
            axes.set_ylabel("efficiency: each device's speed, % of one alone")
            axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
            # Below the axes: inside, it would cover lines that fall steeply.
            figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=10)
            figure.savefig(path, dpi=110)
        finally:
            plt.close(figure)


def measured(axes: Axes, rows: Sequence[ScalingRow]) -> set[int]:
    """A line for each strategy and mode, with the predictions for the same sizes."""
    counts: set[int] = set()
    lines = dict.fromkeys((r.strategy, r.mode) for r in rows if r.world_size > 1)
    for number, (strategy, mode) in enumerate(lines):
        colour = LINES[number % len(LINES)]
        same = [r for r in rows if (r.strategy, r.mode) == (strategy, mode)]
        name = strategy
        points = {1: 100.0, **{r.world_size: 100 * r.efficiency for r in same if r.efficiency}}
        axes.plot(*_xy(points), color=colour, marker="o", label=f"{name}, {mode}: measured")
        counts |= set(points)
        if guess := {r.world_size: 100 * r.predicted.efficiency for r in same if r.predicted}:
            style: Any = {"color": colour, "linestyle": "--", "marker": "x"}
            axes.plot(*_xy({1: 100.0, **guess}), **style, label=f"{name}, {mode}: predicted")
    return counts


def predicted(
    axes: Axes, rows: Sequence[ScalingRow], further: dict[str, dict[int, float]]
) -> set[int]:
    lines = list(dict.fromkeys((r.strategy, r.mode) for r in rows if r.world_size > 1))
    for strategy, beyond in further.items():
        number = next((i for i, (name, _) in enumerate(lines) if name == strategy), len(lines))
        if max(beyond) <= max((r.world_size for r in rows if r.strategy == strategy), default=1):
            continue  # no network is known for larger sizes
        points = {n: 100 * efficiency for n, efficiency in beyond.items()}
        style: Any = {"color": LINES[number % len(LINES)], "linestyle": ":", "linewidth": 2.0}
        axes.plot(*_xy(points), **style, label=f"{strategy}, weak: predicted beyond")
    return {n for beyond in further.values() for n in beyond}


def references(axes: Axes) -> list[tuple[float, float, str]]:
    """Thin lines of Azure's published numbers. Returns the end and the name of each."""
    ends = []
    for gpu, libraries in published.AZURE_RATES.items():
        for library, rates in libraries.items():
            points = {n: 100 * rate / n / rates[1] for n, rate in rates.items()}
            dash = (0, (1, 2)) if library == published.NCCL else "-"
            axes.plot(*_xy(points), color=GREY, linewidth=0.9, linestyle=dash, alpha=0.8)
            last = max(points)
            ends.append((float(last), points[last], f"{gpu}, {library}"))
    return ends


def label_right(axes: Axes, ends: Sequence[tuple[float, float, str]]) -> None:
    """Writes names at the right of the axes without overlap, each joined to its line by dots.

    If the axes extend far beyond the ends of the lines, the names are beside these ends: a long
    dotted line would look like a curve.
    """
    at = -100.0
    top = axes.get_ylim()[1]
    last = max(x for x, _, _ in ends)
    inside = axes.get_xlim()[1] > FAR * last
    for x, y, name in sorted(ends, key=lambda end: end[1]):
        at = max(y, at + GAP * top / TOP)
        axes.annotate(
            f"{name} (Azure, published)",
            xy=(x, y),
            xytext=(1.25 * last if inside else 1.015, at / top),
            textcoords=axes.get_xaxis_transform() if inside else "axes fraction",
            color="#5b6876",
            fontsize=8.5,
            va="center",
            annotation_clip=False,
            # Below the curves, which matter most.
            zorder=1.5,
            bbox={"boxstyle": "square,pad=0.05", "color": "white", "linewidth": 0},
            arrowprops=ARROW,
        )


def _xy(points: dict[int, float]) -> tuple[list[int], list[float]]:
    return sorted(points), [points[n] for n in sorted(points)]
