"""`python -m distdl drill RUN | overrides`: prove that a run survives faults (docs/drill.md).

It trains a short copy of the run undisturbed, and one for each fault, which strikes at a random
moment; then it compares the samples and the weights. Your run is not touched.

  python -m distdl drill +experiment=resnet50_ddp debug=cpu trainer.devices=2
  python -m distdl drill outputs/default/r --faults kill_rank,sigstop --seed 1
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from distdl.cli.arguments import Parser
from distdl.util.errors import Problem, UserError
from distdl.util.suggest import did_you_mean


def main(argv: Sequence[str]) -> int:
    """Returns 0 if the run survived every fault that can be done here."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("python -m distdl drill", description=__doc__, formatter_class=raw)
    parser.add_argument(
        "run", nargs="+", metavar="RUN|OVERRIDES", help="a run's folder, or as for a run"
    )
    parser.add_argument("--faults", default="all", help="all, or some: kill_rank,sigstop")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the ranks (0)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each run (40)")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="largest difference of weights (0: no bit)"
    )
    options = parser.parse_intermixed_args(list(argv))

    from distdl.tools.drill import drill
    from distdl.tools.drill.faults import FAULTS

    names = [*FAULTS] if options.faults == "all" else options.faults.split(",")
    problems = [
        Problem(
            "--faults",
            f"no {name!r}",
            did_you_mean(name, FAULTS) or ", ".join(FAULTS),
            code="wrong-choice",
        )
        for name in names
        if name not in FAULTS
    ]
    if options.steps < 20:
        problems.append(
            Problem("--steps", f"must be 20 or more, not {options.steps}", code="out-of-range")
        )
    if not options.tolerance >= 0:
        problems.append(
            Problem(
                "--tolerance", f"must be 0 or more, not {options.tolerance}", code="out-of-range"
            )
        )
    if problems:
        raise UserError(*problems)
    options.faults = [*dict.fromkeys(names)]
    return drill.drill(config_of(options.run), options)


def config_of(words: Sequence[str]) -> DictConfig:
    """The config of a run's next attempt, or of a new run."""
    from distdl.config import compose
    from distdl.launch import resuming
    from distdl.runs.directory import RunDirectory

    if ("=" in words[0] or words[0][0] in "+~") and not Path(words[0]).is_dir():
        return compose.compose(words)
    return resuming.plan(RunDirectory.open(words[0]), words[1:]).config
