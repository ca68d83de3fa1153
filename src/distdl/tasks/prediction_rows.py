"""Rows of predictions on disk: parts as Parquet, CSV or JSON lines, and a manifest at the end."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from distdl.runs.directory import PREDICTING, shown
from distdl.util.atomic_files import remove_leftovers, write_bytes
from distdl.util.errors import Unfinished, UserError

# A column has one value per row: a number, a text, a list, or None.
Table = Mapping[str, Sequence[Any]]

# Programs that read a folder of Parquet files (pandas, Spark) skip names that begin with "_".
MANIFEST, PROGRESS = "_manifest.json", PREDICTING


def parquet(table: Table) -> bytes:
    import pyarrow
    from pyarrow.parquet import write_table

    # All parts need the same types, also one in which all images are damaged, or none.
    numbers = {name for name in table if name.startswith("probability")}
    arrays = {
        name: pyarrow.array(values, pyarrow.float64() if name in numbers else pyarrow.string())
        if not any(value is not None for value in values)
        else pyarrow.array(values)
        for name, values in table.items()
    }
    file = io.BytesIO()
    write_table(pyarrow.table(arrays), file)
    return file.getvalue()


def comma_separated(table: Table) -> bytes:
    text = io.StringIO(newline="")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(table)
    for row in zip(*table.values(), strict=True):
        lines.writerow([json.dumps(v) if isinstance(v, list) else v for v in row])
    return text.getvalue().encode()


def json_lines(table: Table) -> bytes:
    rows = zip(*table.values(), strict=True)
    return "".join(json.dumps(dict(zip(table, row, strict=True))) + "\n" for row in rows).encode()


FORMATS: dict[str, Callable[[Table], bytes]] = {
    "parquet": parquet,
    "csv": comma_separated,
    "jsonl": json_lines,
}


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
        format: One of `FORMATS`.
    """

    def __init__(self, folder: Path, format: str) -> None:
        self.folder, self.format = folder, format
        self.stored = StoredRows()

    @property
    def complete(self) -> bool:
        return (self.folder / MANIFEST).exists()

    def open(self) -> None:
        """Reads which parts are there.

        Raises:
            UserError: The folder holds something else, or is damaged.
        """
        path = self.folder / (MANIFEST if self.complete else PROGRESS)
        other = "choose another folder: task.output=NAME"
        if not path.exists():
            names = self.folder.iterdir() if self.folder.is_dir() else ()
            if self.folder.is_file() or any(not each.name.startswith(".") for each in names):
                raise UserError.at("task.output", f"{shown(self.folder)} holds other files", other)
            return
        remove_leftovers(self.folder)
        try:
            self.stored = StoredRows.model_validate_json(path.read_bytes())
        except ValidationError as error:
            what = f"{shown(path)} is damaged: {error.errors()[0]['msg']}"
            raise UserError.at("task.output", what, other) from None
        for part in self.stored.parts:
            file = self.folder / part.name
            if not file.is_file() or _sha256(file.read_bytes()) != part.sha256:
                what = f"{shown(file)} is not what was written"
                raise UserError.at("task.output", what, f"remove {shown(self.folder)}, or {other}")

    def describe(self, **facts: str | int | None) -> None:
        """Adds what the rows are of: the checkpoint, the data, the columns.

        Raises:
            UserError: The stored rows are of another.
        """
        for name, value in facts.items():
            before = self.stored.described.setdefault(name, value)
            if before != value:
                what = f"{shown(self.folder)} holds rows of {name} {before}, not {value}"
                raise UserError.at("task.output", what, "choose another folder: task.output=NAME")
        if not self.complete:
            self._write(PROGRESS)

    def add(self, table: Table, counts: Mapping[str, int]) -> None:
        """Stores one part, and adds its `counts` to those of all parts.

        Raises:
            Unfinished: It cannot be written (a full disk).
        """
        stored, data = self.stored, FORMATS[self.format](table)
        name, rows = f"part-{len(stored.parts):05d}.{self.format}", len(next(iter(table.values())))
        self._write(name, data)
        stored.parts.append(StoredPart(name=name, rows=rows, sha256=_sha256(data)))
        stored.rows += rows
        stored.counts |= {key: stored.counts.get(key, 0) + counts[key] for key in counts}
        self._write(PROGRESS)

    def finish(self) -> None:
        """Writes the manifest."""
        self._write(MANIFEST)
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def _write(self, name: str, data: bytes | None = None) -> None:
        if data is None:
            data = self.stored.model_dump_json(indent=1).encode()
        try:
            write_bytes(self.folder / name, data)
        except OSError as error:
            what = f"cannot write {shown(self.folder / name)}: {error.strerror or error}"
            raise Unfinished.at("task.output", what, "the same command resumes") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
