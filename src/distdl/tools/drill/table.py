"""The table of a drill: for the screen, drill.md and drill.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from distdl.runs.files import write_json, write_text
from distdl.tools.drill.trial import FaultRow
from distdl.util import table


def cells(row: FaultRow, columns: Sequence[str]) -> tuple[str, ...]:
    if row.survived is None:
        done = {"fault": row.fault, "survived": f"not run here: {row.note}"}
        return tuple(done.get(column, "") for column in columns)
    weights = "" if row.difference is None else f"differ by {row.difference:.2g}"
    counts = "" if row.lost is None else f"{row.lost} / {row.repeated}"
    by_column = {
        "fault": row.fault,
        "detected after": _seconds(row.detected_s),
        "named": row.named and f"{'rightly' if row.rightly else 'WRONGLY'}: {row.named}",
        "resumed after": _seconds(row.resumed_s),
        "samples lost / repeated": counts or ("not recorded" if row.difference is not None else ""),
        "weights": "bit-equal" if row.difference == 0 else weights,
        "ran again": row.of_s and f"{_seconds(row.again_s)} of {_seconds(row.of_s)}",
        "files": row.files,
        "survived": "yes" if row.survived else f"NO: {row.note}",
    }
    return tuple(by_column[column] or "" for column in columns)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def text(rows: Sequence[FaultRow], columns: Sequence[str]) -> str:
    """A table in Markdown, whose columns are aligned."""
    return table.markdown(columns, [cells(row, columns) for row in rows])


def show(rows: Sequence[FaultRow], columns: Sequence[str]) -> None:
    """Prints the table."""
    table.show(columns, [cells(row, columns) for row in rows])


def write(folder: Path, rows: Sequence[FaultRow], columns: Sequence[str], **facts: object) -> None:
    """Writes drill.json and drill.md."""
    write_json(folder / "drill.json", {**facts, "rows": [asdict(row) for row in rows]})
    settings = "".join(f"- {name}: {value}\n" for name, value in facts.items())
    write_text(folder / "drill.md", f"# Drill\n\n{settings}\n{text(rows, columns)}")
