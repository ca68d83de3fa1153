"""Rows of predictions on disk: parts as Parquet, CSV or JSON lines, and a manifest at the end."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from distdl.runs.directory import shown
from distdl.util.atomic_files import atomic_file, remove_leftovers, write_bytes
from distdl.util.errors import UserError

log = logging.getLogger(__name__)

# A column has one value per row: a number, a text, a list, or None.
Table = Mapping[str, Sequence[Any]]

MANIFEST, PROGRESS = "manifest.json", "progress.json"


def write_parquet(table: Table, file: BinaryIO) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(dict(table)), file)


def write_csv(table: Table, file: BinaryIO) -> None:
    with io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(table)
        for row in zip(*table.values(), strict=True):
            lines.writerow([json.dumps(v) if isinstance(v, list) else v for v in row])
        text.flush()
        text.detach()


def write_jsonl(table: Table, file: BinaryIO) -> None:
    for row in zip(*table.values(), strict=True):
        file.write(json.dumps(dict(zip(table, row, strict=True))).encode() + b"\n")


FORMATS: dict[str, Callable[[Table, BinaryIO], None]] = {
    "parquet": write_parquet,
    "csv": write_csv,
    "jsonl": write_jsonl,
}


class Rows:
    """A folder of parts, which one process writes.

    `progress.json` lists the complete parts with their sha256, and is replaced after each part.
    `manifest.json` replaces it when all rows are there.

    Args:
        folder: Absent, empty, or from an interrupted call with the same `described`.
        format: One of `FORMATS`.
        described: What the rows are of: the checkpoint, the data, the columns.
    """

    def __init__(self, folder: Path, format: str, described: Mapping[str, Any]) -> None:
        self.folder, self.format = folder, format
        self.described = {**described, "format": format}
        self.parts: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}
        self.complete = False

    @property
    def count(self) -> int:
        return sum(part["rows"] for part in self.parts)

    def open(self) -> None:
        """Reads which parts are there.

        Raises:
            UserError: The folder holds something else, or is damaged.
        """
        paths = [self.folder / MANIFEST, self.folder / PROGRESS]
        path = next((path for path in paths if path.exists()), None)
        other = "choose another folder: task.output=NAME"
        if path is None:
            if self.folder.exists() and any(self.folder.iterdir()):
                what = f"{shown(self.folder)} holds other files"
                raise UserError.at("task.output", what, other)
            return
        remove_leftovers(self.folder)
        try:
            kept = json.loads(path.read_bytes())
            parts = [{k: part[k] for k in ("name", "rows", "sha256")} for part in kept["parts"]]
            before, self.counts = dict(kept["described"]), dict(kept["counts"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError.at("task.output", f"{shown(path)} is damaged: {error}", other) from None
        for key, value in self.described.items():
            if before.get(key) != value:
                what = f"{shown(self.folder)} holds rows of another {key}: {before.get(key)}"
                raise UserError.at("task.output", f"{what}, not {value}", other)
        for part in parts:
            file = self.folder / Path(str(part["name"])).name
            if not file.is_file() or _sha256(file) != part["sha256"]:
                what = f"{shown(file)} is not what was written"
                raise UserError.at("task.output", what, f"remove {shown(self.folder)}, or {other}")
        self.parts, self.complete = parts, path.name == MANIFEST

    def add(self, table: Table, counts: Mapping[str, int]) -> None:
        """Stores one part, and adds its `counts` to those of all parts.

        Raises:
            UserError: It cannot be written (a full disk).
        """
        rows = len(next(iter(table.values())))
        path = self.folder / f"part-{len(self.parts):05d}.{self.format}"
        try:
            with atomic_file(path) as file:
                FORMATS[self.format](table, file)
            self.parts.append({"name": path.name, "rows": rows, "sha256": _sha256(path)})
            for name, value in counts.items():
                self.counts[name] = self.counts.get(name, 0) + value
            self._record(PROGRESS)
        except OSError as error:
            what = f"cannot write {shown(path)}: {error.strerror or error}"
            raise UserError.at("task.output", what, "the same command resumes") from error

    def finish(self) -> None:
        """Writes the manifest."""
        self._record(MANIFEST)
        (self.folder / PROGRESS).unlink(missing_ok=True)
        self.complete = True

    def _record(self, name: str) -> None:
        facts = {"described": self.described, "rows": self.count, "counts": self.counts}
        text = json.dumps({**facts, "parts": self.parts}, indent=1)
        write_bytes(self.folder / name, text.encode() + b"\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
