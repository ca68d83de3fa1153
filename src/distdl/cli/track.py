"""`python -m distdl track sync RUN`: send what a tracking server has not got yet."""

from __future__ import annotations

import argparse

from distdl.runs.records import find_run
from distdl.tracking.sync import sync


def main(argv: list[str]) -> int:
    """Sends the rest of a run; 0 if all has arrived or a process of the run is still sending, else
    1."""
    parser = argparse.ArgumentParser(prog="distdl track", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("sync", help="send what the tracking server has not got yet")
    verb.add_argument("run", metavar="RUN", help="the run's folder")
    return sync(find_run(parser.parse_args(argv).run))
