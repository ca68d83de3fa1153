"""What an examination has measured, row by row, and the table of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

from distdl.util import table as tables
from distdl.util.screen import fitted, terminal_width

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "not checked"


class Finding(NamedTuple):
    """One thing that was checked in one place.

    Args:
        where: A host, a rank or a pair of them.
        state: PASS, WARN, FAIL or SKIP.
        value: What was measured, in `unit`; None: `unit` is the result in words.
        remedy: What to do about it; "" for PASS.
    """

    check: str
    where: str
    state: str
    value: float | None
    unit: str
    remedy: str = ""

    @property
    def measured(self) -> str:
        if self.value is None:
            return self.unit
        digits = 0 if abs(self.value) >= 1000 else 4
        return f"{self.value:,.{digits}{'g' if digits else 'f'}} {self.unit}"

    def __str__(self) -> str:
        text = f"{self.check} of {self.where}: {self.measured}"
        return f"{text}; {self.remedy}" if self.remedy else text


class Limit(NamedTuple):
    """Between what bounds a value is right: above `warn` (and `fail`) if these are the lower
    bounds, below them if `most`."""

    unit: str
    fail: float
    warn: float
    remedy: str
    most: bool = False

    def row(self, check: str, where: str, value: float, more: str = "") -> Finding:
        """The value judged; `more` is added to the unit."""
        sign = -1 if self.most else 1
        state = FAIL if sign * value < sign * self.fail else PASS
        state = WARN if state == PASS and sign * value < sign * self.warn else state
        bad = state != PASS
        return Finding(check, where, state, value, self.unit + more, self.remedy if bad else "")


def slow(rates: Mapping[Any, float], share: float) -> set[Any]:
    """Whose rate is below that share of the median of all others."""
    below = set()
    for key, rate in rates.items():
        others = [rates[other] for other in rates if other != key]
        if others and rate < share * median(others):
            below.add(key)
    return below


def table(rows: Sequence[Finding]) -> str:
    """The table for the screen: one line per problem, and one per check for all that passes.

    The remedies of what fails are in the error that follows."""
    columns = ("check", "where", "state", "measured")
    width = terminal_width()
    shown = tables.text(columns, [*_short(rows)], width=width)
    warned = "".join(f"{row.state}: {row}\n" for row in rows if row.state == WARN)
    return shown + fitted(warned, width)


def _short(rows: Sequence[Finding]) -> Iterator[tuple[str, str, str, str]]:
    for (check, state), equal in groupby(rows, lambda row: (row.check, row.state)):
        same = sorted(equal, key=lambda row: row.value or 0)
        if state in (WARN, FAIL) or len(same) == 1:
            yield from ((check, row.where, state, row.measured) for row in same)
            continue
        ends = dict.fromkeys((same[0].measured, same[-1].measured))
        text = " to ".join(ends)
        if same[0].value is None:
            text = ", ".join(dict.fromkeys(row.measured for row in same))
        where = f"all {len({row.where for row in same})}"
        yield check, same[0].where if where == "all 1" else where, state, text
