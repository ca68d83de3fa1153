"""`python -m distdl doctor [overrides]`: are the hosts, links and devices of a job all right?"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TextIO

from distdl.doctor import FILE
from distdl.ranks import environment
from distdl.util.errors import UserError

EPILOG = """\
It runs on the ranks that the same overrides would train on, with any launcher:

  python -m distdl doctor trainer.devices=2
  python -m distdl doctor launcher=mpi launcher.hosts=[node1,node2] trainer.num_nodes=2 --expect 12
  python -m distdl +experiment=resnet50_ddp preflight=true      the same at the start of a training
"""


def main(argv: Sequence[str]) -> int:
    """Returns 0 if nothing fails, 1 if something does."""
    parser = argparse.ArgumentParser(
        "python -m distdl doctor",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="as for a run")
    parser.add_argument("--expect", type=float, metavar="GB/s", help="of a link between two hosts")
    parser.add_argument(
        "--json", action="store_true", help="print doctor.json instead of the table"
    )
    options = parser.parse_intermixed_args(list(argv))
    if options.expect is not None and not 0 < options.expect < math.inf:
        raise UserError.at("--expect", f"must be more than 0, not {options.expect}")
    overrides = ["experiment_name=doctor", *options.overrides, "task=doctor", "tracking=none"]
    if options.expect is not None:
        overrides.append(f"task.expect={options.expect}")

    from distdl.config import compose
    from distdl.launch import dry_run, external, planning, start
    from distdl.runs.directory import read_json

    if environment.detect():
        return int(external.train(overrides) != 0)
    planned = planning.plan(compose.compose(overrides))
    if planned.config.dry_run:
        print(dry_run.render(planned))
        return 0
    with _aside() if options.json else nullcontext(sys.stdout) as output:
        code = start.start(planned, [*sys.argv])
        last = planned.run.last_attempt()
        if options.json and last:
            report = read_json(last.path / FILE)
            first = last.first_error() or {}
            report = report or {
                "checks": [],
                "error": first.get("message", last.status().get("error")),
            }
            print(json.dumps(report, indent=1), file=output, flush=True)
    return int(code != 0)


@contextmanager
def _aside() -> Iterator[TextIO]:
    """Sends what this process and its ranks print to stderr; yields the real output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w") as output:
            yield output
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
