"""`python -m distdl track sync RUN`: send the metrics that a tracking server has missed."""

from __future__ import annotations

from distdl.cli.arguments import Parser
from distdl.runs.records import find_run
from distdl.tracking.sync import SEND_TO, sync
from distdl.util.answers import Answer


def main(argv: list[str]) -> Answer:
    """The exit code is 0 if all has arrived, or a process of the run is still sending; else 1."""
    parser = Parser("python -m distdl track", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("sync", help="send the metrics that the tracking server has missed")
    verb.add_argument("run", metavar="RUN", help="the run's folder")
    verb.add_argument(
        "--experiment", metavar="NAME", help="send the run to this experiment instead"
    )
    verb.add_argument(SEND_TO, metavar="URI", help="the server of the run, if you trust it")
    options = parser.parse_args(argv)
    return sync(find_run(options.run), options.experiment, options.send_credentials_to)
