"""The files in an archive and the tables of a database (SQLite), one level deep, read in memory
and within limits."""

from __future__ import annotations

import base64
import bz2
import contextlib
import gzip
import json
import lzma
import sqlite3
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from urllib.parse import quote

from distdl.util.errors import Unsearched

LIMIT = 1 << 28  # bytes that are read of an archive, unpacked
MEMBERS = 20_000
PIECE = 1 << 22
ROWS = 1000  # of a table that are read at once
SQLITE = b"SQLite format 3\0"
PACKED: dict[bytes, Callable[[BufferedReader], BufferedIOBase]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
}
DAMAGED = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    sqlite3.Error,
)

Member = tuple[str, Callable[[int], bytes]]  # its name, and what reads it


def is_archive(start: bytes) -> bool:
    """Whether a file that begins with these 512 bytes is a zip, a tar, a database, or is packed."""
    marks = (*PACKED, b"PK\x03\x04", SQLITE)
    return start.startswith(marks) or start[257:262] == b"ustar"


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file in an archive; of a packed file, which has no name, "".

    Yields:
        Of a large file several pieces. A damaged archive ends early: it is searched as a file, too.

    Raises:
        Unsearched: It is encrypted, or larger than the limits. What was read is yielded before.
    """
    try:
        with path.open("rb") as file:
            start = file.read(512)
            file.seek(0)
            if start.startswith(SQLITE):
                yield from _limited(_of_database(path))
                return
            if start.startswith(b"PK\x03\x04"):
                yield from _limited(_of_zip(file))
                return
            opened = next((op for mark, op in PACKED.items() if start.startswith(mark)), None)
            unpacked: BufferedIOBase = opened(file) if opened else file
            head = unpacked.read(512)
            unpacked.seek(0)
            is_tar = head[257:262] == b"ustar"
            yield from _limited(_of_tar(unpacked) if is_tar else iter([("", unpacked.read)]))
    except DAMAGED:
        return


def _of_zip(file: BufferedReader) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.flag_bits & 1:
                raise Unsearched("it is encrypted")
            if not entry.is_dir():
                with archive.open(entry) as member:
                    yield entry.filename, member.read


def _of_tar(unpacked: BufferedIOBase) -> Iterator[Member]:
    with tarfile.open(fileobj=unpacked, mode="r|") as archive:
        for entry in archive:
            if file := archive.extractfile(entry) if entry.isfile() else None:
                yield entry.name, file.read


def _of_database(path: Path) -> Iterator[Member]:
    """The tables, as lines of JSON. Nothing is written: no journal is played back, and neither
    views nor the functions of a schema are evaluated."""
    address = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
        database.text_factory = bytes
        database.execute("PRAGMA trusted_schema = OFF")
        tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE '%VIRTUAL%'"
        for (table,) in database.execute(tables).fetchall():
            name = table.decode(errors="replace")
            with contextlib.suppress(sqlite3.Error):  # a damaged table
                quoted = name.replace('"', '""')
                rows = database.execute(f'SELECT * FROM "{quoted}"')
                columns = [column[0] for column in rows.description]
                yield f"{name}.jsonl", _reader(rows, columns)


def _reader(rows: sqlite3.Cursor, columns: list[str]) -> Callable[[int], bytes]:
    def read(_: int) -> bytes:
        lines = (dict(zip(columns, map(_text, row), strict=True)) for row in rows.fetchmany(ROWS))
        return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode()

    return read


def _text(value: bytes | float | None) -> str | float | None:
    """A cell: text as it is, other bytes in base64."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value[:PIECE]).decode()


def _limited(files: Iterator[Member]) -> Iterator[tuple[str, bytes]]:
    left = LIMIT
    for number, (name, read) in enumerate(files):
        if number >= MEMBERS:
            raise Unsearched(f"it has more than {MEMBERS:,} files")
        while piece := read(min(PIECE, left + 1)):
            left -= len(piece)
            if left < 0:
                raise Unsearched(f"it has more than {LIMIT >> 20} MB")
            yield name, piece
