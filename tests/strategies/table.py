"""The table in docs/strategies/checkpoints.md, from what `make matrix` has measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.conftest import ROOT
from tests.strategies.matrix import TOPOLOGIES

PAGE = ROOT / "docs/strategies/checkpoints.md"
BEGIN, END = "<!-- table: any to any -->\n", "<!-- /table -->"


def render(found: Mapping[tuple[str, str], float]) -> str:
    """Rows: before; columns: after. A difference of zero is zero: equal in every bit."""
    names = list(TOPOLOGIES)
    rows = [["", *names], ["---"] * (len(names) + 1)]
    for before in names:
        rows.append([f"**{before}**", *(shown(found.get((before, after))) for after in names)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def shown(value: float | None) -> str:
    if value is None:
        return "not run"
    return "0" if value == 0 else f"{value:.0e}"


def write(found: Mapping[tuple[str, str], float], page: Path = PAGE) -> None:
    """Puts the table into its place in the page."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}{render(found)}{END}{after}")
