"""Writes the tar files and the index of a prepared data set."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from distdl.datasets.format import ROW, File, Shard, Split
from distdl.util.atomic_files import write_bytes

BLOCK = 512  # bytes of a tar block: a header is one, contents are padded to a multiple


class ShardFile:
    """Writes a tar file with two members per sample, `<key>.jpg` and `<key>.cls`.

    The same samples give the same bytes, since it stores no times and no owners.

    `number` is the shard's index in its split.
    """

    def __init__(self, file: BinaryIO, number: int) -> None:
        self._file, self._number = file, number
        self._hash = hashlib.sha256()
        self._offset = 0
        self._rows: list[tuple[int, int, int, int, bytes]] = []

    def add(self, key: str, extension: str, data: bytes, label: int) -> None:
        """Appends an encoded image and its label; `key` is at most 90 letters, digits, `_`, `-`."""
        start = self._offset + BLOCK
        self._member(key + extension, data)
        self._member(f"{key}.cls", str(label).encode())
        self._rows.append((self._number, start, len(data), label, hashlib.sha256(data).digest()))

    def close(self, name: str) -> tuple[Shard, np.ndarray[Any, Any]]:
        """Writes the end of the tar; returns the shard and its rows of the index (`ROW`)."""
        self._write(bytes(2 * BLOCK))
        rows = np.array(self._rows, dtype=ROW)
        return Shard(name, self._offset, self._hash.hexdigest(), len(rows)), rows

    def _member(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._write(info.tobuf(tarfile.USTAR_FORMAT))
        self._write(data)
        self._write(bytes(-len(data) % BLOCK))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._offset += len(data)


def write_index(
    out: Path, split: str, shards: Sequence[Shard], rows: np.ndarray[Any, Any]
) -> Split:
    """Writes a split's index, and returns the split's entry for the manifest."""
    memory = io.BytesIO()
    np.save(memory, rows)
    data, name = memory.getvalue(), f"{split}.index.npy"
    write_bytes(out / name, data)
    index = File(name, len(data), hashlib.sha256(data).hexdigest())
    return Split(len(rows), index, tuple(shards))
