"""`python -m distdl resume RUN [overrides]`: continue a run where it stopped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from distdl.cli.arguments import Parser
from distdl.config import compose, programs
from distdl.launch import dry_run, external, jobs, left_out, resuming
from distdl.launch import start as launch
from distdl.ranks import environment
from distdl.runs.directory import RunDirectory, shown
from distdl.util.answers import Answer
from distdl.util.errors import UserError


def main(argv: Sequence[str]) -> Answer | int:
    """Starts the next attempt of a run; `launch.resuming` decides which overrides it may have."""
    parser = Parser("python -m distdl resume", description=__doc__)
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run directory")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="e.g. trainer.max_epochs=20 trainer.devices=2"
    )
    words, command = programs.split(argv)
    options = parser.parse_args(words)
    options.overrides += command
    if options.run is None or ("=" in options.run and not Path(options.run).exists()):
        newest = next(iter(jobs.runs_below(Path(compose.compose([]).output_dir))), None)
        remedy = "python -m distdl jobs list shows all runs"
        if newest is not None:
            remedy += f"; the newest: python -m distdl resume {shown(newest.path)}"
        raise UserError.at("RUN", what="name the run to resume", remedy=remedy, code="incomplete")
    run = RunDirectory.open(options.run)
    if environment.detect() is not None:  # torchrun -m distdl resume RUN
        return external.main(lambda ranks: resuming.plan(run, options.overrides, ranks))
    return start(run, options.overrides)


def start(run: RunDirectory, overrides: Sequence[str]) -> Answer:
    planned = resuming.plan(run, overrides)
    if not planned.config.dry_run:
        return launch.answer(planned, sys.argv)
    return dry_run.answer(left_out.fit(planned, set()))
