"""The table of a scaling measurement, and what is to be said of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from distdl.commands._scale_rows import Rented, Row, at, dollars

# Share of one device: measured and predicted are taken to agree, beside the spread.
CLOSE = 0.05
# Columns that a narrow terminal does without, the first one first; scale.json has all of them.
GIVE_WAY = (
    "data wait",
    "spread",
    "communication",
    "batch",
    "step",
    "predicted",
    "verdict",
    "$ an epoch",
)
NAME = 20  # characters of a strategy's in one line, where there is no room for more


def print_rows(rows: Sequence[Row], rented: Rented | None) -> None:
    """A table for each mode."""
    # In a log nothing is as narrow as a terminal, and a column that is cut says nothing.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for mode in dict.fromkeys(row.mode for row in rows):
        what = "as much for each device" if mode == "weak" else "the same for all together"
        columns: dict[str, list[str]] = {}
        for row in (r for r in rows if r.mode == mode):
            cells = {
                "strategy": row.strategy,
                "nodes x devices": f"{row.nodes} x {row.devices}",
                "batch": f"{row.global_batch:,}",
                rows[0].unit: f"{row.rate:,.1f}",
                "spread": percent(row.spread),
                "step": f"{1000 * row.step_seconds:,.4g} ms",
                "efficiency": percent(row.efficiency),
                "predicted": percent(row.predicted.efficiency if row.predicted else None),
                "communication": percent(row.communication),
                "data wait": percent(row.data_wait),
                "verdict": row.bound,
                **({"$ an epoch": dollars(row.price) if row.price else "-"} if rented else {}),
            }
            for name, cell in cells.items():
                columns.setdefault(name, []).append(cell)
        widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
        least = min(NAME, widths["strategy"])
        for name in GIVE_WAY:
            if sum(widths.values()) + 2 * (len(widths) - 1) > console.width:
                widths["strategy"] = least
                widths.pop(name, None)
        title = f"{mode} scaling: {what}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in widths:
            left = name == "strategy"
            how, floor = ("left", least) if left else ("right", None)
            table.add_column(name, justify=how, no_wrap=not left, min_width=floor, overflow="fold")  # type: ignore[arg-type]
        for line in zip(*(columns[name] for name in widths), strict=True):
            table.add_row(*line)
        console.print(table)
        console.print()
    if rented and rented.price is None:
        print(f"note    no price of {rented.name} is known here")
    elif rented:
        print(
            f"note    prices: whole VMs of {rented.name} at ${rented.price} an hour (indicative), "
            "as if the device measured here were its own"
        )


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def gaps(rows: Sequence[Row], ahead: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Where the measurement refutes the prediction: the worst of each strategy and mode.

    Args:
        rows: All of them.
        ahead: Strategy to devices to what is predicted beyond (weak scaling).
    """
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for row in rows:
        if row.predicted is None or row.efficiency is None or row.is_disturbed:
            continue
        gap, key = abs(row.efficiency - row.predicted.efficiency), (row.strategy, row.mode)
        if gap <= row.spread * row.efficiency + CLOSE or gap <= worst.get(key, (0.0, ""))[0]:
            continue
        most = max(r.world_size for r in rows if (r.strategy, r.mode) == key)
        beyond = row.mode == "weak" and max(ahead.get(row.strategy, {1: 1.0})) > most
        said = (
            f"do not believe what is predicted beyond {most} devices either"
            if beyond
            else "what slows it here is not in the prediction"
            if row.efficiency < row.predicted.efficiency
            else "the prediction is too careful here"
        )
        text = (
            f"{at(row)}: measured {percent(row.efficiency)}, predicted "
            f"{percent(row.predicted.efficiency)}, {100 * gap:.0f} points apart: {said}"
        )
        worst[key] = gap, text
    return [text for _, text in worst.values()]
