"""`python -m distdl plan +experiment=... [overrides]`: which strategy fits, and without a GPU."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from distdl.errors import Problem, UserError

EPILOG = """\
The same overrides as a run. One training step is measured on fake tensors, so no GPU and little
memory is needed; data.root must be readable here, or plan with data=synthetic.

  python -m distdl plan +experiment=resnet50_ddp
  python -m distdl plan +experiment=resnet50_ddp --devices 8 --device-memory 16 --link 100
"""


def main(argv: Sequence[str]) -> int:
    """Prints a table of strategies and a recommendation.

    Raises:
        UserError: Anything is wrong with the config, the sizes, or the training step.
    """
    parser = argparse.ArgumentParser(
        "python -m distdl plan",
        description="Estimates memory and traffic of each strategy, and recommends one.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="as for a run")
    parser.add_argument("--devices", type=int, help="all together; by default the run's, else 8")
    parser.add_argument("--device-memory", type=float, default=16, help="GiB of each (16)")
    parser.add_argument("--link", type=float, default=100, help="Gbit/s that each sends (100)")
    parser.add_argument(
        "--tflops", type=float, default=50, help="of each, as sustained, not as advertised (50)"
    )
    options = parser.parse_intermixed_args(list(argv))
    problems = [
        Problem(f"--{name.replace('_', '-')}", f"must be more than 0, not {value}")
        for name in ("devices", "device_memory", "link", "tflops")
        if (value := getattr(options, name)) is not None and value <= 0
    ]
    if problems:
        raise UserError(*problems)
    return plan(options)


def plan(options: argparse.Namespace) -> int:
    from distdl import batches, compose, own_code, validate
    from distdl.job import Resources
    from distdl.planning import root_of

    config = compose.compose(options.overrides)
    devices, note = how_many(config.trainer, options.devices)
    size = Resources(1, devices, "gpu")
    root = root_of(config)
    notes, facts = validate.validate(config, size, project_root=str(root))
    if not config.get("optimizer") and not facts.get("model_configures_optimizers"):
        raise UserError(Problem("optimizer", "there is none", "choose one, e.g. optimizer=sgd"))
    config.pop("hydra", None)
    own_code.make_importable(own_code.own_folders(root))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from distdl.commands import _plan_advice, _plan_estimate, _plan_measure

        global_batch = batches.global_batch_size(config, size) or devices
        found = _plan_measure.measure(config, global_batch)
    machine = _plan_estimate.Machine(
        devices, options.device_memory * 2**30, options.link * 1e9, options.tflops * 1e12
    )
    rows = _plan_estimate.estimates(found, machine)
    advice = _plan_advice.advise(found, rows, machine)
    show(found, rows, machine, advice, [*([note] if note else []), *notes, *found.notes], options)
    return 0


def digits(size: float) -> str:
    """Two after the point, or as many as show that it is not nothing."""
    return f"{size:.2f}" if size >= 0.005 or not size else f"{size:.1g}"


def how_many(trainer: Any, given: int | None) -> tuple[int, str]:
    """Devices of the run: as told, as the config says, as there are here, or 8; and a note."""
    from distdl import resources

    if given:
        return given, ""
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes") or 1
    if isinstance(devices, int) and devices > 0:
        return devices * int(nodes), ""
    if devices is not None and not isinstance(devices, (str, int)):
        return len(devices) * int(nodes), ""
    gpus = resources.visible_gpus()
    return (gpus, "") if gpus else (8, "8 devices are taken, since none are here (--devices)")


def show(
    found: Any,
    rows: Sequence[Any],
    machine: Any,
    advice: Any,
    notes: Sequence[str],
    options: argparse.Namespace,
) -> None:
    """The table on the screen."""
    from rich.console import Console
    from rich.table import Table

    from distdl.traffic import in_words

    gib = 2**30
    # A small model has nothing to show in GiB.
    unit, scale = ("GiB", gib) if rows[0].total >= gib else ("MiB", 2**20)
    # In a log nothing is as narrow as a terminal, and a column that is cut says nothing.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(
        f"step    batch {found.batch_size} per device, {found.flops / 1e12:.3g} TFLOP, "
        f"{found.flops / machine.flops:.3g} s of work on each device",
        f"size    {found.gradients / scale:.3g} {unit} trained weights, "
        f"{found.activations / scale:.3g} {unit} activations",
        f"on      {machine.devices} devices of {machine.memory / gib:g} GiB, "
        f"{options.link:g} Gbit/s, {options.tflops:g} TFLOP/s",
        sep="\n",
        highlight=False,
    )
    title = f"{unit} on the fullest device"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    columns = "weights", "gradients", "optimizer", "activations", "other", "total", "fits"
    for name in (*columns, "sent per step", "step, s"):
        table.add_column(name, justify="right", no_wrap=name != "fits")
    for row in rows:
        if row.missing:
            table.add_row(row.name, *"-" * (len(columns) + 2))
            continue
        parts = (row.weights, row.gradients, row.optimizer, row.activations, row.other, row.total)
        sizes = [digits(part / scale) for part in parts]
        fits = "yes" if row.fits(machine) else "[bold]no[/bold]"
        seconds = f"{row.seconds(found, machine):.3g}"
        table.add_row(row.name, *sizes, fits, in_words(row.sent), seconds)
    console.print(table, highlight=False)
    hosted = [
        f"{row.name}: {row.host / scale:.2f} {unit} of host memory per device; each step takes its "
        "gradients there and its weights back"
        for row in rows
        if row.host
    ]
    missing = [f"{row.name}: {row.missing}" for row in rows if row.missing]
    several = machine.devices > 1
    accumulates = [f"single: {machine.devices} batches, accumulated: one step of all the others"]
    for note in (*(accumulates if several else ()), *hosted, *missing, *notes):
        console.print(f"note    {note}", highlight=False, markup=False)
    chosen = " ".join(advice.overrides)
    command = f"python -m distdl {' '.join(options.overrides)} {chosen}".replace("  ", " ")
    console.print(f"\n[bold]advice  {chosen or 'none'}[/bold]", highlight=False)
    console.print(f"        {advice.reason}.", highlight=False, markup=False)
    if chosen:
        console.print(f"        {command}", highlight=False, markup=False, soft_wrap=True)
