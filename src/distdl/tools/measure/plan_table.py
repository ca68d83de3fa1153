"""The table of `distdl plan`: what each strategy needs, and which one is recommended."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distdl.util import table
from distdl.util.screen import say

if TYPE_CHECKING:
    from distdl.tools.measure.plan import StrategyPlan


def show(plan: StrategyPlan, options: argparse.Namespace) -> None:
    """Prints the table."""
    from distdl.distributed.traffic import in_words
    from distdl.tools.measure.plan import RECOMPUTE

    measured = plan.measured
    machine = plan.machine
    # In GiB a small model would be 0.00.
    unit, scale = ("GiB", 2**30) if plan.rows[0].total >= 2**30 else ("MiB", 2**20)
    flops = measured.flops
    say(
        f"step    batch {measured.batch_size} per device, {flops / 1e12:.3g} TFLOP, "
        f"{flops / machine.flops:.3g} s of work on each device"
    )
    say(
        f"size    {measured.gradients / scale:.3g} {unit} trained weights, "
        f"{measured.activations / scale:.3g} {unit} activations"
    )
    say(
        f"on      {machine.devices} devices of {options.device_memory:g} GiB, "
        f"{options.link:g} Gbit/s, {options.tflops:g} TFLOP/s"
    )
    sizes = ("weights", "gradients", "optimizer", "activations", "other", "total")
    columns = ("strategy", *sizes, "fits", "sent per step", "step, s")
    notes = []
    if machine.devices > 1:
        notes.append(f"single: {machine.devices} batches, accumulated: one step of all the others")
    rows = []
    for row in plan.rows:
        if row.missing:
            rows.append([row.name] + ["-"] * (len(columns) - 1))
            notes.append(f"{row.name}: {row.missing}")
            continue
        if row.host:
            notes.append(
                f"{row.name}: {row.host / scale:.2f} {unit} of host memory per device; each step "
                "takes its gradients there and its weights back"
            )
        needed = [digits(getattr(row, name) / scale) for name in sizes]
        fits = "yes" if row.fits(machine) else "no"
        seconds = f"{row.seconds(measured, machine):.3g}"
        rows.append([row.name, *needed, fits, in_words(row.sent), seconds])
    say(f"{unit} on the fullest device")
    table.show(columns, rows, numbers=True)
    for note in (*notes, *plan.notes):
        say(f"note    {note}")
    chosen = plan.advice.overrides
    say(f"\nadvice  {shlex.join(chosen) or 'none'}")
    say(f"        {plan.advice.reason}.")
    if chosen:
        say(f"        {command(options.overrides, chosen)}")
    if (other := plan.recomputing) and RECOMPUTE not in chosen:
        fits = "which fits" if other.fits else "which does not fit either"
        say(f"or      {RECOMPUTE}")
        say(
            f"        {other.strategy} then takes {digits(other.after / scale)} {unit} instead of "
            f"{digits(other.before / scale)}, {fits}, for {other.work:.0%} more operations."
        )


def command(typed: Sequence[str], chosen: Sequence[str]) -> str:
    """The run with the advice, which takes the place of what was typed for the same keys."""
    replaced = {override.partition("=")[0] for override in chosen}
    keys = [(each.lstrip("+~").partition("=")[0], each) for each in typed]
    kept = [each for key, each in keys if key not in replaced and key.split(".")[0] not in replaced]
    return shlex.join(["python", "-m", "distdl", *kept, *chosen])


def digits(size: float) -> str:
    """Two decimal places, or more if the value would show as zero."""
    return f"{size:.2f}" if size >= 0.005 or not size else f"{size:.1g}"
