"""The results of `task=benchmark` for a report: where a step's time goes."""

from __future__ import annotations

from typing import Any

from distdl.config.recipe import unit_of
from distdl.tools.measure import PHASES
from distdl.tools.measure.screen import PHASE_NAMES, facts, milliseconds, setting_text
from distdl.tools.pages import plots

INPUTS = {"real": "real input", "held": "held input"}


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and text of each row, the most important first."""
    verdict = result["verdict"]
    step = result["real"]["step_seconds"]
    unit = unit_of(result["setting"].get("data"))
    rates = (f"{result[key]['images_per_second']:,.1f} {unit} with {INPUTS[key]}" for key in INPUTS)
    return [
        ("verdict", f"{verdict['bound']}: {verdict['why']}"),
        *(("try", remedy) for remedy in verdict["remedies"]),
        ("speed", ", ".join(rates)),
        ("step", f"{milliseconds(step['median'])} (median), {milliseconds(step['p95'])} (p95)"),
        ("on", setting_text(result)),
        *facts(result),
    ]


def draw(result: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """One bar per kind of input, with its phases in milliseconds; and the legend."""
    with plots.picture("Where a step's time goes", height=2.2) as (axes, finish):
        legend = []
        left = [0.0, 0.0]
        for number, phase in enumerate(PHASES):
            width = [1000 * result[key]["split"][phase] for key in INPUTS]
            if any(width):
                axes.barh([1, 0], width, left=left, color=plots.LINES[number], height=0.6)
                left = [a + b for a, b in zip(left, width, strict=True)]
                legend.append((PHASE_NAMES[phase], plots.LINES[number]))
        axes.set_yticks([1, 0], list(INPUTS.values()))
        axes.set_xlabel("milliseconds")
        axes.grid(visible=False, axis="y")
        return finish(), legend
