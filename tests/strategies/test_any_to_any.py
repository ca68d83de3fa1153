"""Three steps under A, three more under B: equal to six under A."""

from itertools import pairwise

import pytest

from tests.conftest import ROOT
from tests.strategies.matrix import (
    HALF,
    MATRIX,
    SAME_TO,
    TOPOLOGIES,
    by_position,
    difference,
    read_by_lightning,
    step,
)

# With test_equality: they share the runs.
pytestmark = pytest.mark.xdist_group("strategies")

# Each topology once on either side, except that DDP is only left.
CHAIN = ("single", "fsdp x2", "zero3 x2", "pipeline x2", "zero1 x2", "PP2xDP2", "ddp x2")
EVERY = [(a, b) for a in TOPOLOGIES for b in TOPOLOGIES]
PAIRS = EVERY if MATRIX else list(pairwise(CHAIN))
# Those that make as many batches of an epoch as DDP does: Lightning counts nothing else.
ON_TWO = [name for name in TOPOLOGIES if name not in ("single", "ddp x2")]

# The table of differences, from what `make matrix` has measured.
PAGE = ROOT / "docs/strategies/checkpoints.md"
BEGIN, END = "<!-- table: any to any -->\n", "<!-- /table -->"


def write(differences, page=PAGE):
    """Replaces the table in the page. Rows: before; columns: after; zero: equal in every bit."""
    rows = [["", *TOPOLOGIES], ["---"] * (len(TOPOLOGIES) + 1)]
    for before in TOPOLOGIES:
        values = [differences.get((before, after)) for after in TOPOLOGIES]
        cells = ["not run" if v is None else f"{v:.0e}" if v else "0" for v in values]
        rows.append([f"**{before}**", *cells])
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}")


@pytest.fixture(scope="module")
def differences():
    """When all pairs were trained (`make matrix`), they become the table in docs/."""
    measured = {}
    yield measured
    if len(measured) == len(EVERY):
        write(measured)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=[f"{a} to {b}" for a, b in PAIRS])
def test_resumes_as_if_nothing_had_changed(before, after, runs, differences):
    result = difference(step(runs.train(before)), step(runs.resumed(before, after)))
    differences[before, after] = result
    assert result < SAME_TO


@pytest.mark.parametrize("name", ON_TWO if MATRIX else ["pipeline x2"])
def test_a_file_of_lightnings_resumes_alike(name, runs):
    file = by_position(step(runs.train("ddp x2"), HALF), runs.folder / "lightnings.ckpt")
    names = [(f"lightning to {n}", TOPOLOGIES[n]) for n in ("ddp x2", name)]
    assert difference(*(step(runs.train(n, t, resume=file)) for n, t in names)) < SAME_TO


@pytest.mark.parametrize("name", dict.fromkeys(name for pair in PAIRS for name in pair))
def test_lightning_alone_reads_the_file(name, runs):
    read_by_lightning(step(runs.train(name)), step(runs.train("single")))
