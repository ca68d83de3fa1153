"""The table of a benchmark on the screen."""

from __future__ import annotations

import sys
from typing import Any

from distdl.benchmark.clock import PHASES
from distdl.config import unit_of

NAMES = {"data": "data wait"}


def show(found: dict[str, Any]) -> None:
    """Prints what `result.assemble` found."""
    from rich.console import Console
    from rich.table import Table

    # In a log nothing is as narrow as a terminal, and a column that is cut says nothing.
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    setting, real, held = found["setting"], found["real"], found["held"]
    count = setting["world_size"]
    console.print(
        f"\n[bold]{setting['strategy']}[/bold] on {setting['nodes']} x "
        f"{setting['devices_per_node']} {setting['accelerator']} ({found['device']}), "
        f"{setting['precision']}, {setting['global_batch']} samples a step"
    )
    table = Table("", box=None, pad_edge=False)
    for title in ("real input", "held input"):
        table.add_column(title, justify="right", no_wrap=True)

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    sides, unit = (real, held), unit_of(setting["data"])
    row(unit, *(f"{s['images_per_second']:,.1f}" for s in sides))
    row(f"{unit} per device", *(f"{s['images_per_second'] / count:,.1f}" for s in sides))
    row(
        "  slowest to fastest window",
        *(f"{min(s['windows']):,.1f} - {max(s['windows']):,.1f}" for s in sides),
    )
    row("step, median", *(milliseconds(s["step_seconds"]["median"]) for s in sides))
    row("step, p95", *(milliseconds(s["step_seconds"]["p95"]) for s in sides))
    for phase in PHASES:
        if not any(s["split"][phase] for s in sides):
            continue
        parts = []
        for s in sides:
            share = s["split"][phase] / sum(s["split"].values())
            parts.append(f"{milliseconds(s['split'][phase])} {100 * share:4.0f} %")
        row(f"  {NAMES.get(phase, phase)}", *parts)
    console.print(table)
    for line in facts(found):
        console.print(line, markup=False)
    said = found["verdict"]
    console.print(f"\n[bold]{said['bound']}[/bold]: {said['why']}")
    for remedy in said["remedies"]:
        console.print(f"  try: {remedy}", markup=False)


def facts(found: dict[str, Any]) -> list[str]:
    """What stands below the table: memory, limits, use, communication."""
    limits, model, link = found["limits"], found["model"], found["link"]
    lines = [f"memory   {found['memory_gib']:.2f} GiB at most on a rank"]
    lines.append(
        f"device   {limits['matrix_flops'] / 1e12:.3g} TFLOP/s ({limits['dtype']}, "
        f"{limits['matrix_size']} x {limits['matrix_size']}), copy "
        f"{limits['copy_bytes'] / 1e9:.3g} GB/s, measured now"
    )
    if model["mfu"] is None:
        lines.append(f"model    {model['note']}")
    else:
        lines.append(
            f"model    {model['flops_per_sample'] / 1e9:.3g} GFLOP a sample: "
            f"{100 * model['mfu']:.1f} % of the matrix rate (MFU) with held input"
        )
        if model["bandwidth_use"] is not None:
            lines[-1] += f", at least {100 * model['bandwidth_use']:.1f} % of the copy bandwidth"
        if model["note"]:
            lines.append(f"         {model['note']}")
    if link:
        lines.append(
            f"link     {link['bandwidth'] / 1e9:.3g} GB/s and {1e6 * link['latency']:.3g} us a "
            f"message, by an all-reduce over {link['ranks']} ranks"
        )
    seen = found["communication"]
    if seen:
        lines.append(
            f"traced   {seen['calls']:.3g} collectives a step, under way for "
            f"{milliseconds(seen['busy_seconds'])}, of which no computation hides "
            f"{milliseconds(sum(seen['exposed'].values()))}"
        )
    return lines


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.4g} ms" if seconds >= 1e-4 else f"{1000 * seconds:.3f} ms"
