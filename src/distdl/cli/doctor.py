"""`python -m distdl doctor [overrides]`: are the hosts, links and devices of a job all right?"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from distdl.cli.arguments import Parser
from distdl.ranks import environment
from distdl.tools.doctor import FILE
from distdl.util.answers import Answer
from distdl.util.errors import UserError


@dataclass(frozen=True)
class Examination:
    """What the doctor found."""

    SCHEMA: ClassVar[str] = "doctor/1"

    run: str
    """The folder of the examination."""
    report: Mapping[str, Any]
    """doctor.json: a list `checks`, each with its name, a verdict and what was measured; empty if
    the ranks did not come so far."""
    failed: str
    """Why there is no report; else empty."""


def main(argv: Sequence[str]) -> Answer | int:
    """The exit code is 0 if nothing fails, 1 if something does."""
    parser = Parser("python -m distdl doctor", description=__doc__)
    parser.add_argument("overrides", nargs="*", default=[], help="as for a run")
    what = "of a link between two hosts (on one host: of two ranks)"
    parser.add_argument("--expect", type=float, metavar="GB/s", help=what)
    options = parser.parse_intermixed_args(list(argv))
    if options.expect is not None and not 0 < options.expect < math.inf:
        raise UserError.at(
            "--expect", what=f"must be more than 0, not {options.expect}", code="out-of-range"
        )
    if any(each.lstrip("+").startswith("task=") for each in options.overrides):
        raise UserError.at(
            "task",
            what="the doctor has its own, and trains nothing",
            remedy="leave it out",
            code="reserved",
        )
    overrides = ["experiment_name=doctor", *options.overrides, "task=doctor", "tracking=none"]
    if options.expect is not None:
        overrides.append(f"task.expect={options.expect}")

    from distdl.config import compose, grammar
    from distdl.launch import dry_run, external, planning, start
    from distdl.runs.directory import read_json, shown

    if environment.detect():
        return int(external.train(overrides) != 0)
    composed = compose.composed(grammar.parse_overrides(overrides))
    planned = planning.plan(composed.config, typed=composed.typed)
    if planned.config.dry_run:
        return dry_run.answer(planned)
    code = start.start(planned, [*sys.argv])
    last = planned.run.last_attempt()
    report = read_json(last.path / FILE) if last else {}
    failed = (last.first_error() or {}).get("message") if last and not report else None
    found = Examination(shown(planned.run.path), report, str(failed or ""))
    return Answer(found, int(code != 0))
