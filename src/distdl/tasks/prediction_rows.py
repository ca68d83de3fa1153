"""Rows of predictions on disk: parts as Parquet, CSV or JSON lines, and a manifest at the end."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from distdl.runs.checkpoints import sha256
from distdl.runs.directory import PREDICTING, shown
from distdl.util.atomic_files import remove_leftovers, write_bytes
from distdl.util.errors import Unfinished, UserError

if TYPE_CHECKING:
    import pyarrow

# Programs that read a folder of Parquet files (pandas, Spark) skip names that begin with "_".
MANIFEST, PROGRESS = "_manifest.json", PREDICTING
OTHER = "choose another folder: task.output=NAME"


def column(values: np.ndarray, missing: np.ndarray | bool = False) -> pyarrow.Array:
    """A column whose type depends on that of the values alone, so that all parts have the same:
    text for objects, and lists for dimensions after the first."""
    import pyarrow
    from pyarrow import compute

    if values.dtype == object:  # a file's name may be no UTF-8
        texts = (
            v and v.encode(errors="surrogateescape").decode(errors="backslashreplace")
            for v in values
        )
        array = pyarrow.array(texts, pyarrow.string())
    else:
        array = pyarrow.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        offsets = np.arange(0, len(array) + 1, size, dtype=np.int32)
        array = pyarrow.ListArray.from_arrays(offsets, array)
    return compute.if_else(missing, None, array)


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


Name = Annotated[str, Field(pattern=r"^part-\d{5,}\.[a-z]+$")]


class StoredRows(BaseModel):
    """What is stored: the content of `_progress.json` and `_manifest.json`."""

    facts: dict[str, str | int | None] = {}
    rows: NonNegativeInt = 0
    counts: dict[str, NonNegativeInt] = {}
    parts: dict[Name, str] = {}  # name to sha256


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
            if not self.stored.rows:  # of a command that was refused
                self.stored = StoredRows()
                (self.folder / MANIFEST).unlink(missing_ok=True)
        elif self.folder.is_file() or [*self.folder.glob("[!.]*")]:
            raise UserError.at("task.output", f"{shown(self.folder)} holds other files", OTHER)
        for name, digest in self.stored.parts.items():
            file = self.folder / name
            if not file.is_file() or sha256(file) != digest:
                what = f"{shown(file)} is not what was written"
                raise UserError.at("task.output", what, f"remove {shown(self.folder)}, or {OTHER}")

    def describe(self, facts: Mapping[str, str | int | None]) -> None:
        """Stores what the rows are of: the checkpoint, the data, the columns; raises UserError if
        the stored rows are of another."""
        for name, value in facts.items():
            before = self.stored.facts.setdefault(name, value)
            if before != value:
                what = f"{shown(self.folder)} holds rows of {name} {before}, not {value}"
                raise UserError.at("task.output", what, OTHER)
        if not self.complete:
            self._record(PROGRESS)

    def add(self, columns: Mapping[str, pyarrow.Array], counts: Mapping[str, int]) -> None:
        """Stores one part, and adds its `counts` to those of all parts; raises Unfinished if it
        cannot be written (a full disk)."""
        import pyarrow

        stored, table = self.stored, pyarrow.table(dict(columns))
        path = self.folder / f"part-{len(stored.parts):05d}.{self.format}"
        self._write(path, encoded(table, self.format))
        stored.parts[path.name] = sha256(path)
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
