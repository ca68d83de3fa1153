"""The members of a sweep beside each other, when it has ended: their table, and their page."""

from __future__ import annotations

from collections.abc import Sequence

from distdl.launch.sweeps import Ended
from distdl.runs.directory import shown
from distdl.tools.compare import page, screen
from distdl.tools.compare.comparison import Comparison
from distdl.tools.compare.facts import facts_of
from distdl.tools.compare.finding import FoundRun
from distdl.tools.pages.writing import output_of
from distdl.util import table
from distdl.util.screen import say


def show(results: Sequence[Ended]) -> None:
    """Prints the members, the best one marked, and writes `compare.html` into the sweep's folder.
    A page that cannot be written costs the sweep nothing but a line."""
    runs = []
    for text, planned, state in results:
        found = FoundRun(shown(planned.run.path), planned.run.path)
        runs.append(facts_of(found, label=text, state=str(state or "UNKNOWN")))
    comparison = Comparison(runs)
    table.show(*screen.runs_table(comparison))
    for spread in comparison.seeds:
        screen.print_note("seed", screen.seed_text(spread))
    folder = results[0][1].run.path.parent
    if not folder.is_dir():  # no member has started
        return
    try:
        output = output_of(None, folder, "compare")
        page.write(output, comparison, (), f"sweep {folder.name}")
    except Exception as error:  # of drawing, too: the members' results stay what they are
        screen.print_note("note", f"there is no page of this sweep: {error}")
    else:
        say(f"page    {shown(output)}")
