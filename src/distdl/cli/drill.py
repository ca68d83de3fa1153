"""`python -m distdl drill RUN | overrides [-- COMMAND]`: prove that a run survives faults.

It trains a short copy of the run undisturbed, and one for each fault, which strikes at a random
moment; then it compares the samples and the weights (docs/drill.md). Your run is not touched.

  python -m distdl drill +experiment=resnet50_ddp debug=cpu trainer.devices=2
  python -m distdl drill outputs/default/r --faults kill_rank,sigstop --seed 1

Behind -- stands a program of your own, which is copied whole (docs/programs.md):

  python -m distdl drill trainer.devices=2 -- train.py --steps 100
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from omegaconf import DictConfig

from distdl.cli.arguments import Parser
from distdl.util.answers import Answer
from distdl.util.errors import Problem, UserError
from distdl.util.suggest import did_you_mean


def main(argv: Sequence[str]) -> Answer:
    """Returns 0 if the run survived every fault that can be done here."""
    parser = Parser(
        "python -m distdl drill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", nargs="*", metavar="RUN|OVERRIDES", help="a run's folder, or as for a run"
    )
    parser.add_argument("--faults", default="all", help="all, or some: kill_rank,sigstop")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the ranks (0)")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run (40)")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="largest difference of weights (0: no bit)"
    )
    from distdl.config import programs

    words, command = programs.split(argv)
    options = parser.parse_intermixed_args(words)
    if not options.run and not command:
        parser.error("the following arguments are required: RUN|OVERRIDES")
    named = bool(options.run) and _is_run(options.run[0])
    options.run += command

    from distdl.tools.drill import drill
    from distdl.tools.drill.faults import FAULTS

    names = [*FAULTS] if options.faults == "all" else options.faults.split(",")
    problems = [
        Problem(
            "--faults",
            what=f"no {name!r}",
            remedy=did_you_mean(name, FAULTS) or ", ".join(FAULTS),
            code="wrong-choice",
        )
        for name in names
        if name not in FAULTS
    ]
    if options.steps is not None and options.steps < 20:
        problems.append(
            Problem("--steps", what=f"must be 20 or more, not {options.steps}", code="out-of-range")
        )
    if not options.tolerance >= 0:
        problems.append(
            Problem(
                "--tolerance",
                what=f"must be 0 or more, not {options.tolerance}",
                code="out-of-range",
            )
        )
    if problems:
        raise UserError(*problems)
    options.faults = [*dict.fromkeys(names)]
    return drill.drill(config_of(options.run, named), options)


def _is_run(word: str) -> bool:
    """Whether a word names the folder of a run, and is no override."""
    return not ("=" in word or word[:1] in ("+", "~")) or os.path.isdir(word)


def config_of(words: Sequence[str], named: bool) -> DictConfig:
    """The config of the next attempt of a run that the first word names, or of a new run."""
    from distdl.config import compose
    from distdl.launch import resuming
    from distdl.runs.directory import RunDirectory

    if not named:
        return compose.compose(words)
    return resuming.plan(RunDirectory.open(words[0]), words[1:]).config
