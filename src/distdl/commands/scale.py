"""`python -m distdl scale [overrides]`: the same benchmark on 1, 2, 4 ... devices and nodes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distdl.errors import Problem, UserError

if TYPE_CHECKING:
    from distdl.commands._scale_members import Member
    from distdl.commands._scale_rows import Rented, Row
    from distdl.scaling import Link

EPILOG = """\
Every size is a run of its own in one folder, by any launcher; started again, the command measures
only what is missing. One device is measured without a strategy: the others are held against it.

  python -m distdl scale +experiment=resnet50_ddp --devices 1,2,4,8
  python -m distdl scale model=resnet50 --devices 1,2 --strategy ddp --strategy fsdp
  python -m distdl scale model=resnet50 --strategy "ddp strategy.comm_hook=bf16" --mode weak
  python -m distdl scale +experiment=resnet50_ddp launcher=slurm --devices 1,4 --nodes 2,4,8
"""
FILE, PLOT = "scale.json", "scale.png"
LOW_PRIORITY = "low_priority"


def main(argv: Sequence[str]) -> int:
    """Measures what is missing, and shows what there is.

    Raises:
        UserError: Anything is wrong with the sizes or the config; nothing is started.
    """
    parser = argparse.ArgumentParser(
        "python -m distdl scale",
        description="Measures weak and strong scaling; see docs/benchmark.md.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="as for a run")
    parser.add_argument("--devices", help="of one node: 1,2,4 (up to what is here)")
    parser.add_argument("--nodes", default="", help="with all devices of a node: 2,4,8")
    parser.add_argument("--strategy", action="append", help="may be repeated (ddp)")
    parser.add_argument("--mode", default="weak,strong", help="weak,strong")
    parser.add_argument("--vm", help="an Azure VM size, for prices; that of launcher=azureml")
    parser.add_argument("--low-priority", action="store_true", help="its low-priority price")
    parser.add_argument("--between", type=float, help="Gbit/s of a node's network, to predict with")
    parser.add_argument("--predict", type=int, metavar="N", help="on paper, up to N devices (4096)")
    options = parser.parse_intermixed_args(list(argv))
    modes = options.mode.split(",")
    problems = [
        Problem("--mode", f"there is no {mode!r}", "weak, strong, or weak,strong")
        for mode in modes
        if mode not in ("weak", "strong")
    ]
    if options.between is not None and options.between <= 0:
        problems.append(Problem("--between", f"must be more than 0, not {options.between}"))
    if options.predict is not None and options.predict < 2:
        problems.append(Problem("--predict", f"must be 2 or more, not {options.predict}"))
    devices = numbers("--devices", options.devices, problems) or ([] if problems else here())
    nodes = numbers("--nodes", options.nodes, problems)
    if problems:
        raise UserError(*problems)

    from distdl.commands import _scale_members

    strategies = options.strategy or ["ddp"]
    counts = _scale_members.sizes(devices, nodes)
    found = _scale_members.members(options.overrides, strategies, counts, modes)
    rented = rented_of(options, found[0])
    state = measure(found)
    if found[0].config.dry_run:
        return 0
    show(found, modes, rented, options)
    return state


def numbers(flag: str, text: str | None, problems: list[Problem]) -> list[int]:
    """`1,2,4` as numbers."""
    try:
        found = [int(part) for part in (text or "").split(",") if part]
    except ValueError:
        found = [0]
    if any(number < 1 for number in found):
        problems.append(Problem(flag, f"{text!r} are no numbers of 1 or more", f"{flag} 1,2,4"))
    return found


def here() -> list[int]:
    """1, 2, 4 ... up to the GPUs of this machine; without any, one and two processes."""
    from distdl import resources

    most = resources.visible_gpus() or 2
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})


def rented_of(options: argparse.Namespace, member: Member) -> Rented | None:
    """The VM whose price counts: as told, or the launcher's.

    Raises:
        UserError: There is no such size.
    """
    from distdl.commands._scale_rows import Rented
    from distdl.launchers.azureml import vm_sizes

    launcher = member.config.launcher
    name = options.vm or launcher.get("vm_size")
    if not name:
        return None
    size = vm_sizes.find(name)
    if size is None:
        raise UserError(Problem("--vm", f"no VM size {name!r} is known", vm_sizes.suggest(name)))
    low = options.low_priority or (not options.vm and launcher.get("tier") == LOW_PRIORITY)
    cost = size.low_priority_price_per_hour if low else size.price_per_hour
    return Rented(size.name, size.gpus, cost, size.infiniband_gbps * 1e9 / 8)


def measure(found: Sequence[Member]) -> int:
    """Starts what is missing, one after the other here, all at once on a cluster; an exit code."""
    from distdl import config as configs
    from distdl import launch, planning, sweeps
    from distdl.job import JobState
    from distdl.run_directory import shown

    due = []
    for member in found:
        state = member.state()
        if state is not None and configs.recipe_of(member.config) != member.run.recipe():
            what = f"{shown(member.run.path)} was measured with another config"
            raise UserError(Problem("name", what, "choose another name=, or leave it out"))
        other = member.other_task() if state is JobState.SUCCEEDED else []
        if other:
            print(f"{member.name}: measured before, with {', '.join(other)}: once more")
            due.append(member)
        elif member.read() and state is JobState.SUCCEEDED:
            print(f"{member.name}: measured before")
        elif state in (JobState.PENDING, JobState.RUNNING):
            print(f"{member.name}: {state.lower()}")
        elif state is JobState.SUCCEEDED:
            where = shown(member.run.path)
            print(f"{member.name}: done, and not here: python -m distdl jobs fetch {where}")
        else:
            due.append(member)
    # All are checked before the first one starts.
    folder = found[0].run.path.parent.name
    planned = [planning.plan(m.config, name=f"{folder}/{m.name}") for m in due]
    code = 0
    for number, (member, plan) in enumerate(zip(due, planned, strict=True), 1):
        if plan.config.dry_run:
            print(f"\n# {member.name}\n{launch.render(plan)}")
            continue
        print(f"\n[{number}/{len(due)}] {member.name}", flush=True)
        if not launch.goes_in_turn(plan.config):
            _, job = launch.submit(plan, sys.argv)
            print(f"submitted  {job.handle}")
            continue
        plan.config.follow = True
        state = sweeps.run_one(plan)
        member.read()
        if state is not JobState.SUCCEEDED:
            code = code or 1
        if state in (JobState.PREEMPTED, JobState.CANCELLED):
            return state.exit_code
    return code


def show(
    found: Sequence[Member],
    modes: Sequence[str],
    rented: Rented | None,
    options: argparse.Namespace,
) -> None:
    """The table, the advice, and their files beside the runs."""
    from distdl.commands import _scale_plot, _scale_rows
    from distdl.run_directory import shown, write_json
    from distdl.scaling import Link

    measured = [m for m in found if m.found]
    missing = [m.name for m in found if not m.found]
    print()
    if missing:
        print(f"not measured: {', '.join(missing)}; this very command goes on with them")
    if not measured:
        return
    between = Link(options.between * 1e9 / 8, 20e-6) if options.between else None
    rows = _scale_rows.rows(measured, rented, between, modes)
    print_rows(rows, rented)
    ahead = further(measured, rented, between, options.predict)
    advice = _scale_rows.advise(rows)
    for line in advice:
        print(f"advice  {line}")
    folder = found[0].run.path.parent
    first = measured[0].found
    record = {
        "time": time.time(),
        "device": first["device"],
        "rows": [as_json(row) for row in rows],
        "predicted": ahead,
        "advice": advice,
        "vm": rented.name if rented else None,
        "missing": missing,
    }
    write_json(folder / FILE, record)
    print(f"table   {shown(folder / FILE)}")
    if any(row.world_size > 1 and row.efficiency for row in rows):
        title = f"Scaling on {first['device']}, {first['setting']['precision']}"
        _scale_plot.draw(folder / PLOT, rows, ahead, title)
        print(f"plot    {shown(folder / PLOT)}")


def further(
    measured: Sequence[Member], rented: Rented | None, between: Link | None, most: int | None
) -> dict[str, dict[int, float]]:
    """Strategy to devices to efficiency, beyond what was measured: printed, and for the plot."""
    from distdl.commands import _scale_rows

    base = next((m.found for m in measured if m.world_size == 1), None)
    if most is None or base is None:
        return {}
    links = _scale_rows.links_of(measured, rented, between)
    devices = _scale_rows.per_node(measured, rented)
    if links[1] is None:
        print(
            f"predict more than the {devices} of a node? Nothing says how fast nodes are joined: "
            "--between GBIT, --vm SIZE, or measure --nodes 2"
        )
    counts = [2**i for i in range(most.bit_length()) if 2**i <= most]
    found: dict[str, dict[int, float]] = {}
    for member in measured:
        if member.world_size == 1 or "weak" not in member.modes or member.strategy in found:
            continue
        guesses = {
            n: _scale_rows.prediction(base, member.found, links, devices, n) for n in counts[1:]
        }
        points = {n: g.efficiency for n, g in guesses.items() if g}
        if points:
            found[member.strategy] = {1: 1.0, **points}
            print(f"\n{member.strategy}, predicted from one device and the measured link (weak):")
            for n, guess in guesses.items():
                if guess:
                    print(f"  {n:>5}  {100 * guess.efficiency:5.1f} %  {guess.why}")
    return found


def print_rows(rows: Sequence[Row], rented: Rented | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from distdl.commands._scale_rows import dollars

    # In a log nothing is as narrow as a terminal, and a column that is cut says nothing.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for mode in dict.fromkeys(row.mode for row in rows):
        what = "as much for each device" if mode == "weak" else "the same for all together"
        table = Table(
            title=f"{mode} scaling: {what}", title_justify="left", box=None, pad_edge=False
        )
        table.add_column("strategy", no_wrap=True)
        names = ["nodes x devices", "batch", "img/s", "spread", "step", "efficiency", "predicted"]
        names += ["communication", "data wait", "verdict"]
        for name in [*names, *(["$ an epoch"] if rented else [])]:
            table.add_column(name, justify="right", no_wrap=True)
        for row in (r for r in rows if r.mode == mode):
            cells = [
                f"{row.nodes} x {row.devices}",
                f"{row.global_batch:,}",
                f"{row.rate:,.1f}",
                percent(row.spread),
                f"{1000 * row.step_seconds:,.4g} ms",
                percent(row.efficiency),
                percent(row.predicted.efficiency if row.predicted else None),
                percent(row.communication),
                percent(row.data_wait),
                row.bound,
            ]
            if rented:
                cells.append("-" if row.price is None else dollars(row.price))
            table.add_row(row.strategy, *cells)
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


def as_json(row: Row) -> dict[str, Any]:
    return {
        **{k: v for k, v in vars(row).items() if k != "predicted"},
        "predicted": vars(row.predicted) if row.predicted else None,
    }
