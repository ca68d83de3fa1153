"""`python -m distdl doctor [overrides]`: are the hosts, links and devices of a job all right?"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence

from distdl.cli.arguments import Parser
from distdl.ranks import environment
from distdl.tools.doctor import FILE
from distdl.util.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Returns 0 if nothing fails, 1 if something does."""
    parser = Parser("python -m distdl doctor", description=__doc__)
    parser.add_argument("overrides", nargs="*", default=[], help="as for a run")
    what = "of a link between two hosts (on one host: of two ranks)"
    parser.add_argument("--expect", type=float, metavar="GB/s", help=what)
    parser.add_argument(
        "--json", action="store_true", help="print doctor.json instead of the table"
    )
    options = parser.parse_intermixed_args(list(argv))
    if options.expect is not None and not 0 < options.expect < math.inf:
        raise UserError.at(
            "--expect", f"must be more than 0, not {options.expect}", code="out-of-range"
        )
    if any(each.lstrip("+").startswith("task=") for each in options.overrides):
        raise UserError.at(
            "task", "the doctor has its own, and trains nothing", "leave it out", code="reserved"
        )
    overrides = ["experiment_name=doctor", *options.overrides, "task=doctor", "tracking=none"]
    if options.expect is not None:
        overrides.append(f"task.expect={options.expect}")

    from distdl.config import compose, grammar
    from distdl.launch import dry_run, external, planning, start
    from distdl.runs.directory import read_json

    if environment.detect():
        return int(external.train(overrides) != 0)
    composed = compose.composed(grammar.parse_overrides(overrides))
    planned = planning.plan(composed.config, typed=composed.typed)
    if planned.config.dry_run:
        print(dry_run.render(planned))
        return 0
    output = sys.stdout
    if options.json:  # whatever else this process and its ranks print goes to stderr
        output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    code = start.start(planned, [*sys.argv])
    last = planned.run.last_attempt()
    if options.json and last:
        report = read_json(last.path / FILE)
        report = report or {"checks": [], "error": (last.first_error() or {}).get("message")}
        print(json.dumps(report, indent=1), file=output, flush=True)
    return int(code != 0)
