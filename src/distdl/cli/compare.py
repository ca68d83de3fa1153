"""`python -m distdl compare RUN RUN ...`: what differs between runs, in a table and on a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from distdl.cli.arguments import Parser, not_empty
from distdl.tools.compare import finding, limits, page, screen
from distdl.tools.compare.answer import answer_of
from distdl.tools.compare.comparison import Comparison
from distdl.tools.compare.facts import facts_of
from distdl.tools.pages.writing import output_of
from distdl.util.answers import Answer
from distdl.util.screen import escaped, say

EPILOG = """\
A RUN is a run's folder, a sweep's, or an address of either in a store (azure://, s3://). The others
are compared with the first run. A metric counts with its best value if it is known which is better.

  python -m distdl compare outputs/default/first outputs/default/second
  python -m distdl compare outputs/default/sweep
  python -m distdl compare BASE NEW --fail-worse val/acc1:0.5% --fail-slower 5%
"""


def main(argv: Sequence[str]) -> Answer:
    """Prints the comparison and writes its page; the exit code is 1 if a run fails a limit."""
    parser = Parser(
        "python -m distdl compare",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    about = "folders of runs or of sweeps"
    parser.add_argument("runs", metavar="RUN", nargs="+", type=not_empty, help=about)
    parser.add_argument("--output", metavar="FILE", help="the page; default: compare.html")
    parser.add_argument("--no-page", action="store_true", help="write no page")
    parser.add_argument(
        limits.WORSE,
        metavar="METRIC:AMOUNT",
        action="append",
        default=[],
        help="exit with 1 if a run is worse than the first by more: val/acc1:0.5%%, val/loss:0.1",
    )
    parser.add_argument(
        limits.SLOWER, metavar="SHARE", help="exit with 1 if a run is slower by more: 5%%"
    )
    options = parser.parse_intermixed_args(argv)
    wanted = limits.parsed(options.fail_worse, options.fail_slower)
    sweep = finding.of_one_sweep(options.runs)
    output = output_of(options.output, sweep or Path(), "compare")
    with finding.found(options.runs) as runs:
        comparison = Comparison([facts_of(run) for run in runs])
        checked = limits.check(comparison, wanted)
        for damaged in (text for run in comparison.runs for text in run.reported.damage):
            say(escaped(f"warning: {damaged}"), to=sys.stderr)
        screen.show(comparison, complete=options.no_page)
        if not options.no_page:
            page.write(output, comparison, checked, " ".join(["compare", *options.runs[:3]]))
            say(f"page    {escaped(str(output))}")
        for each in checked:
            word = "ok" if each.passed else "FAILED"
            say(escaped(f"{word:7} {each.name}: {each}"), to=sys.stderr)
        written = None if options.no_page else str(output)
        code = int(any(not each.passed for each in checked))
        return Answer(answer_of(comparison, checked, written), code)
