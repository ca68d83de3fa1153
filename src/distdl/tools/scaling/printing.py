"""The table of a scaling measurement, its notes and files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from distdl.runs.directory import shown, write_json
from distdl.tools.scaling import Prediction, plot
from distdl.tools.scaling.members import Member
from distdl.tools.scaling.results import Rented, ScalingRow, dollars
from distdl.util import table
from distdl.util.screen import say

FILE, PLOT = "scale.json", "scale.png"

# Measured and predicted efficiency agree if they differ by at most this, plus the spread.
CLOSE = 0.05


def print_rows(rows: Sequence[ScalingRow], rented: Rented | None) -> None:
    """A table for each mode."""
    for mode in dict.fromkeys(row.mode for row in rows):
        batch = "a batch for each device" if mode == "weak" else "one batch for all devices"
        lines = [_cells(row, rented) for row in rows if row.mode == mode]
        say(f"{mode} scaling: {batch}")
        table.show([*lines[0]], [[*line.values()] for line in lines], numbers=True)
        say()
    if rented and rented.price is None:
        say(f"note    the price of {rented.name} is not known")
    elif rented:
        costs = f"prices: whole VMs of {rented.name} at ${rented.price} an hour (indicative)"
        say(f"note    {costs}, at the speed measured here")


def _cells(row: ScalingRow, rented: Rented | None) -> dict[str, str]:
    """The name of each column, and what the row has there."""
    cells = {
        "strategy": row.strategy,
        "nodes x devices": f"{row.nodes} x {row.devices}",
        "batch": f"{row.global_batch:,}",
        row.unit: f"{row.rate:,.1f}",
        "spread": percent(row.spread),
        "step": f"{1000 * row.step_seconds:,.4g} ms",
        "efficiency": percent(row.efficiency),
        "predicted": percent(row.predicted.efficiency if row.predicted else None),
        "communication": percent(row.communication),
        "data wait": percent(row.data_wait),
        "verdict": row.bound,
    }
    if rented:
        cells["$ an epoch"] = dollars(row.price) if row.price else "-"
    return cells


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def gaps(rows: Sequence[ScalingRow], further: Mapping[str, Mapping[int, object]]) -> list[str]:
    """Where the measurement contradicts the prediction: the worst case of each strategy and mode.
    `further`: strategy to devices to the prediction beyond the measured sizes (weak scaling)."""
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for row in rows:
        if row.predicted is None or row.efficiency is None or row.is_disturbed:
            continue
        expected = row.predicted.efficiency
        key = (row.strategy, row.mode)
        gap = abs(row.efficiency - expected)
        if gap <= row.spread * row.efficiency + CLOSE or gap <= worst.get(key, (0.0, ""))[0]:
            continue
        most = max(r.world_size for r in rows if (r.strategy, r.mode) == key)
        if row.mode == "weak" and max(further.get(row.strategy, {1: None})) > most:
            meaning = f"do not trust predictions beyond {most} devices either"
        elif row.efficiency < expected:
            meaning = "something slows it that the prediction does not include"
        else:
            meaning = "the prediction is too pessimistic here"
        text = f"{row}: measured {percent(row.efficiency)}, predicted {percent(expected)}"
        worst[key] = gap, f"{text}, {100 * gap:.0f} points apart: {meaning}"
    return [text for _, text in worst.values()]


def write(
    members: Sequence[Member],
    before: Sequence[Member],
    rows: Sequence[ScalingRow],
    further: Mapping[str, Mapping[int, Prediction]],
    **more: object,
) -> None:
    """Writes the table, with `more`, and the plot into the folder of the requested runs. `before`
    are other members that were measured in this folder; `further` is as in `gaps`."""
    folder = members[0].run.path.parent
    first = next(m for m in (*members, *before) if m.result)
    efficiencies = {
        strategy: {1: 1.0, **{n: guess.efficiency for n, guess in guesses.items()}}
        for strategy, guesses in further.items()
    }
    record = {
        "time": time.time(),
        "device": first.result["device"],
        "rows": [asdict(row) for row in rows],
        "predicted": efficiencies,
        **more,
        "missing": [m.name for m in members if not m.result],
    }
    write_json(folder / FILE, record)
    say(f"table   {shown(folder / FILE)}")
    if any(row.world_size > 1 and row.efficiency for row in rows):
        title = f"Scaling on {first.result['device']}, {first.result['setting']['precision']}"
        plot.draw(folder / PLOT, rows, efficiencies, title, first.is_resnet50)
        say(f"plot    {shown(folder / PLOT)}")
    else:  # an older plot would show rows that the table lacks
        (folder / PLOT).unlink(missing_ok=True)
