"""The format of a prepared data set: `dataset.json`, one index per split, and tar files.

    dataset.json             the manifest, written last: without it there is no data set
    train.index.npy          one row per sample (`ROW`), in the order of the shards
    train-00000.tar          n01440764_10026.jpg, n01440764_10026.cls, ... (webdataset's names)
    val.index.npy, val-00000.tar

With the index, one `pread` reads a sample, and no tar is ever scanned. Each tar is self-contained,
so that any webdataset reader can read it (https://github.com/webdataset/webdataset).
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from distdl.util.atomic_files import write_bytes
from distdl.util.errors import UserError

MANIFEST = "dataset.json"
WORK = ".preparing"  # a folder that `distdl prepare` removes when the data set is complete
BLOCK = 512  # bytes of a tar block: a header is one block, contents fill whole blocks
FORMAT = "distdl-shards"
VERSION = 1

# Location of a sample's encoded image, its label, and the sha256 of its bytes.
ROW = np.dtype(
    [("shard", "<u4"), ("offset", "<u8"), ("bytes", "<u4"), ("label", "<i4"), ("sha256", "V32")]
)


@dataclass(frozen=True)
class File:
    """A file of a data set: its name next to the manifest, its length, its sha256 in hex."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard(File):
    """A tar file of `samples` samples."""

    samples: int


@dataclass(frozen=True)
class Split:
    """ "train" or "val": an index of `samples` rows, whose "shard" is an index into `shards`."""

    samples: int
    index: File
    shards: tuple[Shard, ...]

    @property
    def bytes(self) -> int:
        """Size of all its shards."""
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """A prepared data set: class names by label, and splits by name.

    `made` records its source and settings, for people and for a check that two data sets are equal.
    """

    classes: tuple[str, ...]
    splits: dict[str, Split]
    made: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """Parses the manifest at `where`; UserError if it is not a manifest of this version."""
        try:
            fields = json.loads(text)
            form, version = fields["format"], fields["version"]
            if form == FORMAT and version > VERSION:
                what = f"{where} was prepared by a newer distdl, as version {version}"
                raise UserError.at("data.root", what, "update distdl")
            if form != FORMAT or version != VERSION:
                raise ValueError(f"format {form!r}, version {version!r}")
            splits = {}
            for name, split in fields["splits"].items():
                shards = tuple(Shard(**shard) for shard in split["shards"])
                splits[name] = Split(split["samples"], File(**split["index"]), shards)
            return cls(tuple(fields["classes"]), splits, fields["made"])
        except (ValueError, KeyError, TypeError) as error:
            what = f"{where} is not a manifest of version {VERSION}: {error}"
            raise UserError.at(
                "data.root", what, "python -m distdl prepare ... writes one"
            ) from error


def load_index(data: bytes, where: str) -> np.ndarray[Any, Any]:
    """Parses the content of the index file `where`; UserError if it does not hold `ROW`s."""
    try:
        rows = np.load(io.BytesIO(data), allow_pickle=False)
        if rows.dtype != ROW:
            raise ValueError(f"its rows are {rows.dtype}")
    except (ValueError, EOFError, OSError) as error:
        raise UserError.at("data.root", f"{where} is not an index: {error}") from error
    return rows


class ShardFile:
    """Writes a tar file with two members per sample, `<key>.jpg` and `<key>.cls`.

    The same samples give the same bytes, since it stores no times and no owners.

    `number` is the shard's index in its split.
    """

    def __init__(self, file: BinaryIO, number: int) -> None:
        self._file = file
        self._number = number
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
    data = memory.getvalue()
    name = f"{split}.index.npy"
    write_bytes(out / name, data)
    index = File(name, len(data), hashlib.sha256(data).hexdigest())
    return Split(len(rows), index, tuple(shards))
