"""`python -m distdl plan +experiment=... [overrides]`: recommends a strategy; needs no GPU."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

from distdl.cli.arguments import Parser
from distdl.util.answers import Answer
from distdl.util.errors import Problem, UserError

EPILOG = """\
Takes the same overrides as a run. One training step is measured on fake tensors, so no GPU and
little memory is needed; data.root must be readable here, or plan with data=synthetic.

  python -m distdl plan +experiment=resnet50_ddp
  python -m distdl plan +experiment=resnet50_ddp --devices 8 --device-memory 16 --link 100
"""


def main(argv: Sequence[str]) -> Answer:
    """Prints a table of strategies and a recommendation."""
    parser = Parser(
        "python -m distdl plan",
        description="Estimates memory and traffic of each strategy, and recommends one.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", default=[], help="as for a run")
    parser.add_argument("--devices", type=int, help="number of all devices (the run's, else 8)")
    parser.add_argument(
        "--device-memory", type=float, default=16, help="memory of each, in GiB (16)"
    )
    parser.add_argument("--link", type=float, default=100, help="Gbit/s that each can send (100)")
    parser.add_argument(
        "--tflops", type=float, default=50, help="sustained TFLOP/s of each, not the peak (50)"
    )
    options = parser.parse_intermixed_args(list(argv))
    problems = []
    for name in ("devices", "device_memory", "link", "tflops"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            option = f"--{name.replace('_', '-')}"
            what = f"must be more than 0, not {value}"
            problems.append(Problem(option, what=what, code="out-of-range"))
    if problems:
        raise UserError(*problems)
    with warnings.catch_warnings(action="ignore"):
        from distdl.tools.measure import plan, plan_answer, plan_table

        planned = plan.plan_strategy(
            options.overrides,
            options.devices,
            memory=options.device_memory * 2**30,
            link=options.link * 1e9,
            flops=options.tflops * 1e12,
        )
    plan_table.show(planned, options)
    chosen = planned.advice.overrides
    command = plan_table.command(options.overrides, chosen) if chosen else ""
    return Answer(plan_answer.answer(planned, command))
