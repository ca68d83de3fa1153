"""Rows of predictions on disk: parts as Parquet, CSV or JSON lines, and a manifest at the end."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from distdl.runs.checkpoints import sha256
from distdl.runs.directory import PREDICTING, shown
from distdl.util.atomic_files import remove_leftovers, write_bytes
from distdl.util.errors import Unfinished, UserError

if TYPE_CHECKING:
    import pyarrow

# Programs that read a folder of Parquet files (pandas, Spark) skip names that begin with "_".
MANIFEST, PROGRESS = "_manifest.json", PREDICTING
OTHER = "choose another folder: task.output=NAME"


def encoded(table: pyarrow.Table, format: str) -> bytes:
    """A table as "parquet", "csv" or "jsonl"."""
    from pyarrow.parquet import write_table

    if format == "parquet":
        write_table(table, file := io.BytesIO())
        return file.getvalue()
    rows = table.to_pylist()
    if format == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    lines = csv.DictWriter(text := io.StringIO(), table.column_names, lineterminator="\n")
    lines.writeheader()
    lines.writerows(rows)
    return text.getvalue().encode()


class StoredPart(BaseModel):
    name: str = Field(pattern=r"^part-\d{5,}\.[a-z]+$")
    rows: PositiveInt
    sha256: str


class StoredRows(BaseModel):
    """What is stored: the content of `_progress.json` and `_manifest.json`."""

    described: dict[str, str | int | None] = {}
    rows: NonNegativeInt = 0
    counts: dict[str, NonNegativeInt] = {}
    parts: list[StoredPart] = []


class Rows:
    """A folder of parts, which one process writes.

    `_progress.json` lists the complete parts with their sha256, and is replaced after each part.
    `_manifest.json` replaces it when all rows are there.

    Args:
        folder: Absent, empty, or from an interrupted call with the same facts (`describe`).
        format: Of `encoded`.
    """

    def __init__(self, folder: Path, format: str) -> None:
        self.folder, self.format, self.stored = folder, format, StoredRows()

    @property
    def complete(self) -> bool:
        return (self.folder / MANIFEST).exists()

    def open(self) -> None:
        """Reads which parts are there; raises UserError if the folder holds something else, or is
        damaged."""
        path = self.folder / (MANIFEST if self.complete else PROGRESS)
        if path.exists():
            remove_leftovers(self.folder)
            try:
                self.stored = StoredRows.model_validate_json(path.read_bytes())
            except ValidationError as error:
                what = f"{shown(path)} is damaged: {error.errors()[0]['msg']}"
                raise UserError.at("task.output", what, OTHER) from None
        elif self.folder.is_file() or [*self.folder.glob("[!.]*")]:
            raise UserError.at("task.output", f"{shown(self.folder)} holds other files", OTHER)
        for part in self.stored.parts:
            file = self.folder / part.name
            if not file.is_file() or sha256(file) != part.sha256:
                what = f"{shown(file)} is not what was written"
                raise UserError.at("task.output", what, f"remove {shown(self.folder)}, or {OTHER}")

    def describe(self, facts: Mapping[str, str | int | None]) -> None:
        """Stores what the rows are of: the checkpoint, the data, the columns; raises UserError if
        the stored rows are of another."""
        for name, value in facts.items():
            before = self.stored.described.setdefault(name, value)
            if before != value:
                what = f"{shown(self.folder)} holds rows of {name} {before}, not {value}"
                raise UserError.at("task.output", what, OTHER)
        if not self.complete:
            self._record(PROGRESS)

    def add(self, table: pyarrow.Table, counts: Mapping[str, int]) -> None:
        """Stores one part, and adds its `counts` to those of all parts; raises Unfinished if it
        cannot be written (a full disk)."""
        stored, path = self.stored, self.folder / f"part-{len(self.stored.parts):05d}.{self.format}"
        self._write(path, encoded(table, self.format))
        stored.parts.append(StoredPart(name=path.name, rows=table.num_rows, sha256=sha256(path)))
        stored.rows += table.num_rows
        stored.counts |= {key: stored.counts.get(key, 0) + counts[key] for key in counts}
        self._record(PROGRESS)

    def finish(self) -> None:
        """Writes the manifest."""
        self._record(MANIFEST)
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def _record(self, name: str) -> None:
        self._write(self.folder / name, self.stored.model_dump_json(indent=1).encode())

    def _write(self, path: Path, data: bytes) -> None:
        try:
            write_bytes(path, data)
        except OSError as error:
            what = f"cannot write {shown(path)}: {error.strerror or error}"
            raise Unfinished.at("task.output", what, "the same command resumes") from error
