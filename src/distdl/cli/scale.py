"""`python -m distdl scale [overrides]`: the same benchmark on 1, 2, 4 ... devices and nodes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from distdl.cli.arguments import Parser
from distdl.util.answers import Answer
from distdl.util.errors import Problem, UserError
from distdl.util.screen import say

EPILOG = """\
Every size is a run of its own in one folder, with any launcher. Started again, the command measures
only the missing sizes. One device is measured without a strategy, for comparison with the others.

  python -m distdl scale +experiment=resnet50_ddp --devices 1,2,4,8
  python -m distdl scale model=resnet50 --devices 1,2 --strategy ddp --strategy fsdp
  python -m distdl scale model=resnet50 --strategy "ddp strategy.comm_hook=bf16" --mode weak
  python -m distdl scale +experiment=resnet50_ddp launcher=slurm --devices 1,4 --nodes 2,4,8
"""


def main(argv: Sequence[str]) -> Answer:
    """Measures the missing sizes, and prints all results."""
    parser = Parser(
        "python -m distdl scale",
        description="Measures weak and strong scaling; see docs/benchmark.md.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", default=[], help="as for a run")
    parser.add_argument("--devices", help="numbers of devices on one node: 1,2,4 (up to all here)")
    parser.add_argument(
        "--nodes", default="", help="numbers of nodes with all their devices: 2,4,8"
    )
    parser.add_argument(
        "--strategy", action="append", help="a strategy to measure (ddp); may be repeated"
    )
    parser.add_argument("--mode", default="weak,strong", help="weak or strong (both)")
    parser.add_argument("--vm", help="an Azure VM size, for prices (launcher=azureml's own)")
    parser.add_argument(
        "--spot", "--low-priority", action="store_true", help="use the spot price of the VM size"
    )
    parser.add_argument("--between", type=float, help="Gbit/s of a node's network, for predictions")
    parser.add_argument(
        "--predict", type=int, metavar="N", help="predict up to N devices, e.g. 4096"
    )
    options = parser.parse_intermixed_args(list(argv))
    modes = options.mode.split(",")
    problems = [
        Problem(
            "--mode",
            what=f"there is no {mode!r}",
            remedy="weak, strong, or weak,strong",
            code="incomplete",
        )
        for mode in modes
        if mode not in ("weak", "strong")
    ]
    if options.between is not None and not 0 < options.between < math.inf:
        problems.append(
            Problem(
                "--between", what=f"must be more than 0, not {options.between}", code="out-of-range"
            )
        )
    if options.predict is not None and options.predict < 2:
        problems.append(
            Problem(
                "--predict", what=f"must be 2 or more, not {options.predict}", code="out-of-range"
            )
        )
    devices = numbers("--devices", options.devices, problems)
    nodes = numbers("--nodes", options.nodes, problems)
    if problems:
        raise UserError(*problems)
    devices = devices or local_counts()

    from distdl.tools.scaling import members as scaling_runs
    from distdl.tools.scaling import results, show
    from distdl.tools.scaling.show import Scaling

    counts = scaling_runs.sizes(devices, nodes)
    if (1, 1) not in counts:
        say("note    one device is measured as well, for comparison")
        counts.insert(0, (1, 1))
    members = scaling_runs.members(options.overrides, options.strategy or ["ddp"], counts, modes)
    rented = results.rented_of(options.vm, options.spot, members[0].config.launcher)
    code = scaling_runs.measure(members)
    if members[0].config.dry_run:
        return Answer(Scaling("", [], {m.name: "dry run" for m in members}, [], []))
    found = show.show(members, modes, rented, options)
    return Answer(
        found, code or int(any(not m.result and m.lacking != "under way" for m in members))
    )


def numbers(flag: str, text: str | None, problems: list[Problem]) -> list[int]:
    """`1,2,4` as numbers."""
    try:
        counts = [int(part) for part in (text or "").split(",") if part]
    except ValueError:
        counts = [0]
    if any(number < 1 for number in counts):
        problems.append(
            Problem(
                flag,
                what=f"must be numbers above 0, such as 1,2,4, not {text!r}",
                code="wrong-type",
            )
        )
    return counts


def local_counts() -> list[int]:
    """1, 2, 4 ... up to the number of GPUs of this machine; 1 and 2 processes without GPUs."""
    from distdl.config import resources

    most = resources.visible_gpus() or 2
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})
