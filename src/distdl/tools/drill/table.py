"""The table of a drill: for the screen, drill.md and drill.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from distdl.runs.files import write_json, write_text
from distdl.tools.drill.trial import FaultRow
from distdl.util import table

COLUMNS = (
    "fault",
    "detected after",
    "named",
    "resumed after",
    "samples lost / repeated",
    "weights",
    "survived",
)


def cells(row: FaultRow) -> tuple[str, ...]:
    if row.survived is None:
        return (row.fault, "", "", "", "", "", f"not run here: {row.note}")
    weights = "" if row.difference is None else f"differ by {row.difference:.2g}"
    counts = "" if row.lost is None else f"{row.lost} / {row.repeated}"
    return (
        row.fault,
        _seconds(row.detected_s),
        row.named and f"{'rightly' if row.rightly else 'WRONGLY'}: {row.named}",
        _seconds(row.resumed_s),
        counts or ("not recorded" if row.difference is not None else ""),
        "bit-equal" if row.difference == 0 else weights,
        "yes" if row.survived else f"NO: {row.note}",
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def text(rows: Sequence[FaultRow]) -> str:
    """A table in Markdown, whose columns are aligned."""
    return table.markdown(COLUMNS, [cells(row) for row in rows])


def show(rows: Sequence[FaultRow]) -> None:
    """Prints the table."""
    table.show(COLUMNS, [cells(row) for row in rows])


def write(folder: Path, rows: Sequence[FaultRow], **facts: object) -> None:
    """Writes drill.json and drill.md."""
    write_json(folder / "drill.json", {**facts, "rows": [asdict(row) for row in rows]})
    settings = "".join(f"- {name}: {value}\n" for name, value in facts.items())
    write_text(folder / "drill.md", f"# Drill\n\n{settings}\n{text(rows)}")
