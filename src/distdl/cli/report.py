"""`python -m distdl report RUN`: one HTML page with a run's curves, attempts and config."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distdl.cli.arguments import Parser
from distdl.tools.report import page
from distdl.tools.report.page import WrittenPage
from distdl.util.answers import Answer
from distdl.util.screen import say
from distdl.util.tail import plain


def main(argv: Sequence[str]) -> Answer:
    """Writes the page."""
    parser = Parser("python -m distdl report", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--output", metavar="FILE", help="default: RUN/report.html")
    options = parser.parse_args(argv)
    output, damage = page.write(options.run, options.output)
    for damaged in damage:
        say(f"warning: {plain(damaged)}", to=sys.stderr)
    say(str(output))
    return Answer(WrittenPage(str(output), damage))
