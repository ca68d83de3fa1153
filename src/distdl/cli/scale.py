"""`python -m distdl scale [overrides]`: the same benchmark on 1, 2, 4 ... devices and nodes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distdl.util.errors import Problem, UserError

if TYPE_CHECKING:
    from distdl.scaling.members import Member
    from distdl.scaling.results import Rented

EPILOG = """\
Every size is a run of its own in one folder, with any launcher. Started again, the command measures
only the missing sizes. One device is measured without a strategy, for comparison with the others.

  python -m distdl scale +experiment=resnet50_ddp --devices 1,2,4,8
  python -m distdl scale model=resnet50 --devices 1,2 --strategy ddp --strategy fsdp
  python -m distdl scale model=resnet50 --strategy "ddp strategy.comm_hook=bf16" --mode weak
  python -m distdl scale +experiment=resnet50_ddp launcher=slurm --devices 1,4 --nodes 2,4,8
"""
# What to do about sizes without a result.
REMEDIES = {
    "not measured": "the same command resumes with them",
    "under way": "once they have ended, the same command shows them",
    "not fetched": "fetch them (see above), then the same command shows them",
}


def main(argv: Sequence[str]) -> int:
    """Measures the missing sizes, and prints all results."""
    parser = argparse.ArgumentParser(
        "python -m distdl scale",
        description="Measures weak and strong scaling; see docs/benchmark.md.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("overrides", nargs="*", help="as for a run")
    add("--devices", help="numbers of devices on one node: 1,2,4 (up to all here)")
    add("--nodes", default="", help="numbers of nodes with all their devices: 2,4,8")
    add("--strategy", action="append", help="a strategy to measure (ddp); may be repeated")
    add("--mode", default="weak,strong", help="weak or strong (both)")
    add("--vm", help="an Azure VM size, for prices (launcher=azureml's own)")
    add("--spot", "--low-priority", action="store_true", help="use the spot price of the VM size")
    add("--between", type=float, help="Gbit/s of a node's network, for predictions")
    add("--predict", type=int, metavar="N", help="predict up to N devices, e.g. 4096")
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
    devices = numbers("--devices", options.devices, problems)
    nodes = numbers("--nodes", options.nodes, problems)
    if problems:
        raise UserError(*problems)
    devices = devices or local_counts()

    from distdl.scaling import members as scaling_runs
    from distdl.scaling import results

    counts = scaling_runs.sizes(devices, nodes)
    if (1, 1) not in counts:
        print("note    one device is measured as well, for comparison")
        counts.insert(0, (1, 1))
    members = scaling_runs.members(options.overrides, options.strategy or ["ddp"], counts, modes)
    rented = results.rented_of(options.vm, options.spot, members[0].config.launcher)
    code = scaling_runs.measure(members)
    if members[0].config.dry_run:
        return 0
    show(members, modes, rented, options)
    return code or int(any(not m.result and m.lacking != "under way" for m in members))


def numbers(flag: str, text: str | None, problems: list[Problem]) -> list[int]:
    """`1,2,4` as numbers."""
    try:
        counts = [int(part) for part in (text or "").split(",") if part]
    except ValueError:
        counts = [0]
    if any(number < 1 for number in counts):
        problems.append(Problem(flag, f"must be numbers above 0, such as 1,2,4, not {text!r}"))
    return counts


def local_counts() -> list[int]:
    """1, 2, 4 ... up to the number of GPUs of this machine; 1 and 2 processes without GPUs."""
    from distdl.config import resources

    most = resources.visible_gpus() or 2
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})


def show(
    members: Sequence[Member],
    modes: Sequence[str],
    rented: Rented | None,
    options: argparse.Namespace,
) -> None:
    """Prints the table and the advice, and writes them beside the runs."""
    from distdl.runs.directory import read_json
    from distdl.scaling import Link, printing, results
    from distdl.scaling import members as scaling_runs

    old = read_json(members[0].run.path.parent / printing.FILE).get("rows") or []
    before, notes = scaling_runs.measured_before(options.overrides, members, old)
    print()
    for state, remedy in REMEDIES.items():
        if names := [m.name for m in members if not m.result and m.lacking == state]:
            print(f"{state}: {', '.join(names)}; {remedy}")
    measured = [m for m in (*members, *before) if m.result]
    if not measured:
        return
    between = Link(options.between * 1e9 / 8, 20e-6) if options.between else None
    every = list(dict.fromkeys([*modes, *scaling_runs.MODES]))  # earlier runs had other modes
    rows = results.rows(measured, rented, between, every)
    printing.print_rows(rows, rented)
    further = results.further(measured, rented, between, options.predict or 1)
    if options.predict and results.links_of(measured, rented, between)[1] is None:
        print(
            f"no prediction beyond the {results.per_node(measured, rented)} of a node: the network "
            "between nodes is unknown; give --between GBIT or --vm SIZE, or measure --nodes 2"
        )
    for strategy, guesses in further.items():
        print(f"\n{strategy}, predicted from one device and the measured link (weak):")
        for n, guess in guesses.items():
            print(f"  {n:>5}  {100 * guess.efficiency:5.1f} %  {guess.why}")
    notes += [*results.disturbed(rows), *printing.gaps(rows, further)]
    advice, vm = results.advise(rows), rented.name if rented else None
    for line in (*(f"note    {each}" for each in notes), *(f"advice  {each}" for each in advice)):
        print(line)
    printing.write(members, before, rows, further, notes=notes, advice=advice, vm=vm)
