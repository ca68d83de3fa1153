"""Three steps under A, three more under B: equal to six under A."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.strategies.matrix import (
    HALF,
    SAME_TO,
    STEPS,
    TOPOLOGIES,
    Runs,
    by_position,
    difference,
    read_by_lightning,
    step,
)

# With test_equality: they share the runs.
pytestmark = pytest.mark.xdist_group("strategies")

# Each topology once on either side, except that DDP is only left.
SIX = [
    ("single", "fsdp x2"),
    ("fsdp x2", "zero3 x2"),
    ("zero3 x2", "pipeline x2"),
    ("pipeline x2", "zero1 x2"),
    ("zero1 x2", "PP2xDP2"),
    ("PP2xDP2", "ddp x2"),
]
EVERY = [(a, b) for a in TOPOLOGIES for b in TOPOLOGIES]
PAIRS = EVERY if "DISTDL_MATRIX" in os.environ else SIX

# The table of differences, from what `make matrix` has measured.
PAGE = ROOT / "docs/strategies/checkpoints.md"
BEGIN, END = "<!-- table: any to any -->\n", "<!-- /table -->"


def render(found: Mapping[tuple[str, str], float]) -> str:
    """Rows: before; columns: after. A difference of zero is zero: equal in every bit."""
    rows = [["", *TOPOLOGIES], ["---"] * (len(TOPOLOGIES) + 1)]
    for before in TOPOLOGIES:
        rows.append([f"**{before}**", *(shown(found.get((before, after))) for after in TOPOLOGIES)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def shown(value: float | None) -> str:
    return "not run" if value is None else f"{value:.0e}" if value else "0"


def write(found: Mapping[tuple[str, str], float], page: Path = PAGE) -> None:
    """Puts the table into its place in the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{render(found)}{END}{rest.partition(END)[2]}")


@pytest.fixture(scope="module")
def found() -> Iterator[dict[tuple[str, str], float]]:
    """The differences; when all pairs were trained (`make matrix`), the table in docs/."""
    differences: dict[tuple[str, str], float] = {}
    yield differences
    if len(differences) == len(EVERY):
        write(differences)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=[f"{a} to {b}" for a, b in PAIRS])
def test_goes_on_as_if_nothing_had_changed(
    before: str, after: str, runs: Runs, found: dict[tuple[str, str], float]
) -> None:
    whole, resumed = runs.whole(before), runs.resumed(before, after)
    found[before, after] = difference(step(whole, STEPS), step(resumed, STEPS))
    assert found[before, after] < SAME_TO


# Those that make as many batches of an epoch as DDP does: Lightning counts nothing else.
ON_TWO = [name for name in TOPOLOGIES if name not in ("single", "ddp x2")]


@pytest.mark.parametrize("name", ON_TWO if "DISTDL_MATRIX" in os.environ else ["pipeline x2"])
def test_a_file_of_lightnings_goes_on_alike(name: str, runs: Runs) -> None:
    file = by_position(step(runs.whole("ddp x2"), HALF), runs.folder / "lightnings.ckpt")
    one, other = (
        step(runs.train(f"lightning to {n}", TOPOLOGIES[n], resume=file), STEPS)
        for n in ("ddp x2", name)
    )
    assert difference(one, other) < SAME_TO


def test_the_table_takes_its_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    for _ in range(2):
        write({("single", "single"): 0.0, ("single", "ddp x2"): 1.2e-8}, page)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}|") and text.endswith(f"{END}after\n")
    assert "| **single** | 0 | 1e-08 | not run |" in text and "old" not in text
    assert BEGIN in PAGE.read_text() and END in PAGE.read_text()


@pytest.mark.parametrize("name", dict.fromkeys(name for pair in PAIRS for name in pair))
def test_lightning_alone_reads_the_file(name: str, runs: Runs) -> None:
    read_by_lightning(step(runs.whole(name), STEPS), step(runs.whole("single"), STEPS))
