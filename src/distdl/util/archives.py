"""The files in an archive, one level deep, read in memory and within limits."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from io import BufferedIOBase, BufferedReader
from pathlib import Path

LIMIT = 1 << 28  # bytes that are read of an archive, unpacked
MEMBERS = 20_000
PIECE = 1 << 22
PACKED: dict[bytes, Callable[[BufferedReader], BufferedIOBase]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
}
DAMAGED = (
    *(OSError, EOFError, ValueError, RuntimeError, NotImplementedError),
    *(zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile),
)

Member = tuple[str, Callable[[int], bytes]]  # its name, and what reads it


class Unsearched(Exception):
    """A part of an archive was not read: the message says why."""


def is_archive(start: bytes) -> bool:
    """Whether a file that begins with these 512 bytes is a zip, a tar, or is packed."""
    packed = any(start.startswith(mark) for mark in PACKED)
    return packed or start.startswith(b"PK\x03\x04") or start[257:262] == b"ustar"


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
