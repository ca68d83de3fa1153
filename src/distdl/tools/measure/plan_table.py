"""The table of `distdl plan`: what each strategy needs, and which one is recommended."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distdl.tools.measure.plan import StrategyPlan


def show(plan: StrategyPlan, options: argparse.Namespace) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    from distdl.distributed.traffic import in_words

    measured, machine, rows, gib = plan.measured, plan.machine, plan.rows, 2**30
    # In GiB a small model would be 0.00.
    unit, scale = ("GiB", gib) if rows[0].total >= gib else ("MiB", 2**20)
    # A log file has no width, and a truncated column is useless.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(
        f"step    batch {measured.batch_size} per device, {measured.flops / 1e12:.3g} TFLOP, "
        f"{measured.flops / machine.flops:.3g} s of work on each device",
        f"size    {measured.gradients / scale:.3g} {unit} trained weights, "
        f"{measured.activations / scale:.3g} {unit} activations",
        f"on      {machine.devices} devices of {options.device_memory:g} GiB, "
        f"{options.link:g} Gbit/s, {options.tflops:g} TFLOP/s",
        sep="\n",
    )
    title = f"{unit} on the fullest device"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    columns = "weights", "gradients", "optimizer", "activations", "other", "total"
    for name in (*columns, "fits", "sent per step", "step, s"):
        table.add_column(name, justify="right", no_wrap=name != "fits")
    notes = [f"single: {machine.devices} batches, accumulated: one step of all the others"]
    notes = notes if machine.devices > 1 else []
    for row in rows:
        if row.missing:
            table.add_row(row.name, *"-" * 9)
            notes.append(f"{row.name}: {row.missing}")
            continue
        if row.host:
            notes.append(
                f"{row.name}: {row.host / scale:.2f} {unit} of host memory per device; each step "
                "takes its gradients there and its weights back"
            )
        sizes = [digits(getattr(row, name) / scale) for name in columns]
        fits = "yes" if row.fits(machine) else "[bold]no[/bold]"
        seconds = f"{row.seconds(measured, machine):.3g}"
        table.add_row(row.name, *sizes, fits, in_words(row.sent), seconds)
    console.print(table)
    for note in (*notes, *plan.notes):
        console.print(f"note    {note}", markup=False, soft_wrap=True)
    chosen = plan.advice.overrides
    heading = f"\nadvice  {shlex.join(chosen) or 'none'}"
    console.print(heading, style="bold", markup=False, soft_wrap=True)
    console.print(f"        {plan.advice.reason}.", markup=False, soft_wrap=True)
    if chosen:
        console.print(f"        {command(options.overrides, chosen)}", markup=False, soft_wrap=True)


def command(typed: Sequence[str], chosen: Sequence[str]) -> str:
    """The run with the advice, which takes the place of what was typed for the same keys."""
    replaced = {override.partition("=")[0] for override in chosen}
    keys = [(each.lstrip("+~").partition("=")[0], each) for each in typed]
    kept = [each for key, each in keys if key not in replaced and key.split(".")[0] not in replaced]
    return shlex.join(["python", "-m", "distdl", *kept, *chosen])


def digits(size: float) -> str:
    """Two decimal places, or more if the value would show as zero."""
    return f"{size:.2f}" if size >= 0.005 or not size else f"{size:.1g}"
