"""Rows of predictions on disk: parts as Parquet, CSV or JSON lines, and a manifest at the end."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import compute
from pyarrow.parquet import read_table, write_table

from distdl.runs.directory import PREDICTING, shown
from distdl.runs.files import Shape, load_json
from distdl.util import strict_json
from distdl.util.atomic_files import remove_leftovers, write_bytes
from distdl.util.errors import Unfinished, UserError

# Programs that read a folder of Parquet files (pandas, Spark) skip names that begin with "_".
MANIFEST = "_manifest.json"
PROGRESS = PREDICTING
# What both hold. Records of older versions have no "columns".
RECORD: Shape = {"facts": dict, "rows": int, "parts": list, "counts": dict, "columns": list}
OTHER = "choose another folder: task.output=NAME"
Columns = Mapping[str, np.ndarray]


def column(values: np.ndarray, missing: np.ndarray | bool = False) -> pyarrow.Array:
    """A column whose type depends on that of the values alone, so that all parts have the same:
    text for objects, and lists for dimensions after the first."""
    if values.dtype == object:  # a file's name may be no UTF-8
        texts = [text and os.fsencode(text).decode(errors="backslashreplace") for text in values]
        array = pyarrow.array(texts, pyarrow.string())
    else:
        array = pyarrow.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        offsets = np.arange(0, len(array) + 1, size, dtype=np.int32)
        array = pyarrow.ListArray.from_arrays(offsets, array)
    return compute.if_else(missing, None, array)


def encoded(table: pyarrow.Table, format: str) -> bytes:
    """A table as "parquet", "csv" or "jsonl"."""
    if format == "parquet":
        file = io.BytesIO()
        write_table(table, file)
        return file.getvalue()
    rows = table.to_pylist()
    if format == "jsonl":
        return "".join(strict_json.dumps(row) + "\n" for row in rows).encode()
    lines = [table.column_names, *(row.values() for row in rows)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()


def _read_again(text: str) -> object:
    """A number or a list of a CSV file; other texts stay."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class Rows:
    """A folder of parts, which one process writes.

    `_progress.json` lists the complete parts, and is replaced after each part. It is renamed to
    `_manifest.json` when all rows are there.

    Args:
        folder: Absent, empty, or from an interrupted call with the same format, facts and data.
        format: Of `encoded`.
        facts: What the rows are of: the checkpoint, the columns.
    """

    def __init__(self, folder: Path, format: str, **facts: str | int | None) -> None:
        self.folder = folder
        self.format = format
        self.facts = {"format": format, **facts}
        self.record: dict[str, Any] = {
            "facts": {},
            "rows": 0,
            "parts": [],
            "counts": {},
            "columns": [],
        }

    def open(self) -> int:
        """Returns how many samples have their rows; raises UserError if the folder holds something
        else, or is damaged."""
        for name in (MANIFEST, PROGRESS):
            self.record |= load_json(self.folder / name, RECORD, OTHER)
        if not self.record["facts"] and any(self.folder.glob("[!.]*")):
            raise UserError.at(
                "task.output",
                what=f"{shown(self.folder)} holds other files",
                remedy=OTHER,
                code="exists-already",
            )
        for path in (self.folder / str(name) for name in self.record["parts"]):
            if not path.is_file():
                raise UserError.at(
                    "task.output",
                    what=f"{shown(path)} is missing",
                    remedy=f"remove {shown(self.folder)}, or {OTHER}",
                    code="incomplete",
                )
        remove_leftovers(self.folder)
        return self.record["counts"].get("samples", self.record["rows"])

    def describe(self, data: str) -> None:
        """Stores what the rows are of; raises UserError if the stored rows are of another."""
        facts = {**self.facts, "data": data}
        if not self.record["parts"]:  # one of images without detections has no rows
            self.record["facts"] = facts
            self._write_record()
        for name, before in self.record["facts"].items():
            if before != facts.get(name):
                raise UserError.at(
                    "task.output",
                    what=(
                        f"{shown(self.folder)} holds rows of {name} {before}, not {facts.get(name)}"
                    ),
                    remedy=OTHER,
                    code="mismatch",
                )

    def add(self, columns: Columns, missing: Columns, **counts: int) -> None:
        """Stores one part.

        Args:
            columns: Each [rows, ...]; objects are text, or None.
            missing: For some columns, which rows have no value: bool [rows].
            counts: Are added to those of the other parts. "samples": how many samples these rows
                are of; otherwise each has one.

        Raises:
            Unfinished: It cannot be written (a full disk).
        """
        arrays = {name: column(each, missing.get(name, False)) for name, each in columns.items()}
        table = pyarrow.table(arrays)
        name = f"part-{len(self.record['parts']):05d}.{self.format}"
        self._write(name, encoded(table, self.format))
        self.record["parts"].append(name)
        self.record["rows"] += table.num_rows
        self.record["columns"] = [*dict.fromkeys((*self.record["columns"], *table.column_names))]
        before = self.record["counts"]
        self.record["counts"] = {key: before.get(key, 0) + n for key, n in counts.items()}
        self._write_record()

    @property
    def columns(self) -> list[str]:
        """The names of all columns, which are there without a row, too."""
        return [*self.record["columns"]] or [*next(self.read(), {})]

    def read(self) -> Iterator[dict[str, object]]:
        """All stored rows, in their order. Of CSV, numbers and lists are those again, and what is
        missing is ""."""
        for name in self.record["parts"]:
            path = self.folder / name
            if self.format == "parquet":
                yield from read_table(path).to_pylist()
            elif self.format == "jsonl":
                yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())
            else:
                with path.open(encoding="utf-8", newline="") as file:
                    for row in csv.DictReader(file):
                        yield {key: _read_again(value) for key, value in row.items()}

    def finish(self) -> None:
        """Calls the record the manifest, if it is not yet."""
        if (self.folder / PROGRESS).exists():
            (self.folder / PROGRESS).replace(self.folder / MANIFEST)

    def _write_record(self) -> None:
        self._write(PROGRESS, strict_json.dumps(self.record, indent=1).encode())

    def _write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        try:
            write_bytes(path, data)
        except OSError as error:
            raise Unfinished.at(
                "task.output",
                what=f"cannot write {shown(path)}: {error.strerror or error}",
                remedy="the same command resumes",
                code="not-writable",
            ) from error
