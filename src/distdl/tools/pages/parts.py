"""What a page of a report is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from markupsafe import Markup


@dataclass
class ReportTable:
    """Rows of cells, without empty columns."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        used = [any(column) for column in zip(*self.rows, strict=True)]
        self.head, *self.rows = (list(compress(row, used)) for row in (self.head, *self.rows))


@dataclass
class ReportFigure:
    """An `<svg>` element from matplotlib, and its legend as (label, colour)."""

    svg: str
    legend: list[tuple[str, str]]

    def __post_init__(self) -> None:
        self.svg = Markup(self.svg)  # matplotlib escapes its texts
        self.legend = [(label.removeprefix("system/"), colour) for label, colour in self.legend]
