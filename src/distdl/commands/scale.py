"""`python -m distdl scale [overrides]`: the same benchmark on 1, 2, 4 ... devices and nodes."""

from __future__ import annotations

import argparse
import math
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
    parser.add_argument("--strategy", action="append", help="may be repeated; without it ddp")
    parser.add_argument("--mode", default="weak,strong", help="weak or strong; without it both")
    parser.add_argument("--vm", help="an Azure VM size, for prices; that of launcher=azureml")
    parser.add_argument("--spot", "--low-priority", action="store_true", help="its spot price")
    parser.add_argument("--between", type=float, help="Gbit/s of a node's network, to predict with")
    parser.add_argument(
        "--predict", type=int, metavar="N", help="on paper, up to N devices, as 4096"
    )
    options = parser.parse_intermixed_args(list(argv))
    modes = options.mode.split(",")
    problems = [
        Problem("--mode", f"there is no {mode!r}", "weak, strong, or weak,strong")
        for mode in modes
        if mode not in ("weak", "strong")
    ]
    if options.between is not None and not 0 < options.between < math.inf:
        problems.append(Problem("--between", f"must be more than 0, not {options.between}"))
    if options.predict is not None and options.predict < 2:
        problems.append(Problem("--predict", f"must be 2 or more, not {options.predict}"))
    devices = numbers("--devices", options.devices, problems) or ([] if problems else here())
    nodes = numbers("--nodes", options.nodes, problems)
    if problems:
        raise UserError(*problems)

    from distdl.commands import _scale_measure, _scale_members

    strategies = options.strategy or ["ddp"]
    counts = _scale_members.sizes(devices, nodes)
    if (1, 1) not in counts:
        print("note    one device is measured as well: the others are held against it")
        counts.insert(0, (1, 1))
    found = _scale_members.members(options.overrides, strategies, counts, modes)
    rented = rented_of(options, found[0])
    code = _scale_measure.measure(found)
    if found[0].config.dry_run:
        return 0
    show(found, modes, rented, options)
    return code or int(any(not m.found and not m.under_way for m in found))


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
        UserError: There is no such size, or a price is asked for of none.
    """
    from distdl.commands._scale_rows import Rented
    from distdl.launchers.azureml import vm_sizes

    launcher = member.config.launcher
    name = options.vm or launcher.get("vm_size")
    if not name:
        if options.spot:
            remedy = "name its VM size too: --vm Standard_ND40rs_v2"
            raise UserError(Problem("--spot", "there is no VM that has a price", remedy))
        return None
    size = vm_sizes.find(name)
    if size is None and not options.vm:
        return None  # trained on all the same; its price is unknown
    if size is None:
        raise UserError(Problem("--vm", f"no VM size {name!r} is known", vm_sizes.suggest(name)))
    spot = options.spot or (not options.vm and launcher.get("tier") in vm_sizes.SPOT)
    cost = size.spot_price_per_hour if spot else size.price_per_hour
    return Rented(size.name, size.gpus, cost, size.infiniband_gbps * 1e9 / 8)


def show(
    found: Sequence[Member],
    modes: Sequence[str],
    rented: Rented | None,
    options: argparse.Namespace,
) -> None:
    """The table, the advice, and their files beside the runs."""
    from distdl.commands import _scale_members, _scale_plot, _scale_rows, _scale_table
    from distdl.run_directory import read_json, shown, write_json
    from distdl.scaling import Link

    folder = found[0].run.path.parent
    before = read_json(folder / FILE).get("rows") or []
    kept, notes = _scale_members.kept(options.overrides, found, before)
    measured = [m for m in [*found, *kept] if m.found]
    missing = [m.name for m in found if not m.found]
    print()
    say_missing(found)
    if not measured:
        return
    between = Link(options.between * 1e9 / 8, 20e-6) if options.between else None
    every = list(dict.fromkeys([*modes, *_scale_members.MODES]))  # kept ones may be of the other
    rows = _scale_rows.rows(measured, rented, between, every)
    _scale_table.print_rows(rows, rented)
    ahead = further(measured, rented, between, options.predict)
    notes += [*_scale_rows.disturbed(rows), *_scale_table.gaps(rows, ahead)]
    advice = _scale_rows.advise(rows)
    for line in notes:
        print(f"note    {line}")
    for line in advice:
        print(f"advice  {line}")
    first = measured[0].found
    record = {
        "time": time.time(),
        "device": first["device"],
        "rows": [as_json(row) for row in rows],
        "predicted": ahead,
        "notes": notes,
        "advice": advice,
        "vm": rented.name if rented else None,
        "missing": missing,
    }
    write_json(folder / FILE, record)
    print(f"table   {shown(folder / FILE)}")
    if any(row.world_size > 1 and row.efficiency for row in rows):
        title = f"Scaling on {first['device']}, {first['setting']['precision']}"
        _scale_plot.draw(folder / PLOT, rows, ahead, title, measured[0].is_resnet50)
        print(f"plot    {shown(folder / PLOT)}")
    else:  # an older one shows what is no longer in the table
        (folder / PLOT).unlink(missing_ok=True)


def say_missing(found: Sequence[Member]) -> None:
    """Which sizes have nothing to show, and what it takes."""
    lacking = [m for m in found if not m.found]
    ways = (
        (
            "not measured",
            "this very command goes on with them",
            [m for m in lacking if not (m.under_way or m.elsewhere)],
        ),
        (
            "under way",
            "once they have ended, this very command shows them",
            [m for m in lacking if m.under_way],
        ),
        (
            "not here",
            "fetch them (see above), then this very command shows them",
            [m for m in lacking if m.elsewhere],
        ),
    )
    for what, then, those in ways:
        if those:
            print(f"{what}: {', '.join(m.name for m in those)}; {then}")


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


def as_json(row: Row) -> dict[str, Any]:
    return {
        **{k: v for k, v in vars(row).items() if k != "predicted"},
        "predicted": vars(row.predicted) if row.predicted else None,
    }
