"""What `distdl scale` prints: the measured sizes, predictions, and advice."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from distdl.util import table
from distdl.util.screen import say

if TYPE_CHECKING:
    from distdl.tools.scaling.members import Member
    from distdl.tools.scaling.results import Rented

# What to do about sizes without a result.
REMEDIES = {
    "not measured": "the same command resumes with them",
    "under way": "once they have ended, the same command shows them",
    "not fetched": "fetch them (see above), then the same command shows them",
}


@dataclass(frozen=True)
class Scaling:
    """What was measured on each number of devices."""

    SCHEMA: ClassVar[str] = "scale/1"

    table: str
    """The JSON file with all of it; empty if nothing was measured."""
    rows: Sequence[Mapping[str, Any]]
    """As in that file: a strategy on a number of devices, its rate and efficiency."""
    missing: Mapping[str, str]
    """Sizes without a result, and why: `not measured`, `under way`, `not fetched`, `dry run`."""
    notes: Sequence[str]
    advice: Sequence[str]


def show(
    members: Sequence[Member],
    modes: Sequence[str],
    rented: Rented | None,
    options: argparse.Namespace,
) -> Scaling:
    """Prints the table and the advice, and writes them beside the runs."""
    from distdl.runs.directory import read_json, shown
    from distdl.tools.scaling import Link, advice, printing, results
    from distdl.tools.scaling import members as scaling_runs

    old = read_json(members[0].run.path.parent / printing.FILE).get("rows") or []
    before, notes = scaling_runs.measured_before(options.overrides, members, old)
    say()
    for state, remedy in REMEDIES.items():
        if names := [m.name for m in members if not m.result and m.lacking == state]:
            say(f"{state}: {', '.join(names)}; {remedy}")
    measured = [m for m in (*members, *before) if m.result]
    missing = {m.name: m.lacking for m in members if not m.result}
    if not measured:
        return Scaling("", [], missing, [], [])
    between = Link(options.between * 1e9 / 8, 20e-6) if options.between else None
    every = list(dict.fromkeys([*modes, *scaling_runs.MODES]))  # earlier runs had other modes
    rows = results.rows(measured, rented, between, every)
    printing.print_rows(rows, rented)
    further = results.further(measured, rented, between, options.predict or 1)
    if options.predict and results.links_of(measured, rented, between)[1] is None:
        say(
            f"no prediction beyond the {results.per_node(measured, rented)} of a node: the network "
            "between nodes is unknown; give --between GBIT or --vm SIZE, or measure --nodes 2"
        )
    for strategy, guesses in further.items():
        say(f"\n{strategy}, predicted from one device and the measured link (weak):")
        predicted = [
            (f"{n:,}", f"{100 * guess.efficiency:.1f} %", guess.why) for n, guess in guesses.items()
        ]
        table.show(("devices", "efficiency", "limited by"), predicted, indent=2)
    notes += [*advice.disturbed(rows), *printing.gaps(rows, further)]
    given = advice.advise(rows)
    for note in notes:
        say(f"note    {note}")
    for line in given:
        say(f"advice  {line}")
    vm = rented.name if rented else None
    printing.write(members, before, rows, further, notes=notes, advice=given, vm=vm)
    file = shown(members[0].run.path.parent / printing.FILE)
    return Scaling(file, [asdict(row) for row in rows], missing, notes, given)
