"""The format of a prepared data set: `dataset.json`, one index per split, and tar files.

    dataset.json             the manifest, written last: without it there is no data set
    train.index.npy          one row per sample, in the order of the shards
    train-00000.tar          n01440764_10026.jpg, n01440764_10026.cls, ... (webdataset's names)
    val.index.npy, val-00000.tar

With the index, one `pread` reads a sample, and no tar is ever scanned. Each tar is self-contained,
so that any webdataset reader can read it (https://github.com/webdataset/webdataset).

Images with labels are version 1: the index (`ROW`) has the labels. Version 2 is for every other
domain, which the manifest names: beside each image lies its record, whose ending is the domain's
(`000000391895.json`), and the index (`RECORD_ROW`) says where that is, and the image's size.
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
VERSION = 2
CLASSIFICATION = "classification"  # the domain of version 1
SPLITS = ("train", "val", "test")

# Location of a sample's encoded image, its label, and the sha256 of its bytes.
ROW = np.dtype(
    [("shard", "<u4"), ("offset", "<u8"), ("bytes", "<u4"), ("label", "<i4"), ("sha256", "V32")]
)
# The same with the location of its record. Width and height are the image's, in pixels; the label
# is a number of the domain (`distdl.domains.record`).
RECORD_ROW = np.dtype(
    [
        ("shard", "<u4"),
        ("offset", "<u8"),
        ("bytes", "<u4"),
        ("label", "<i4"),
        ("sha256", "V32"),
        ("record_offset", "<u8"),
        ("record_bytes", "<u4"),
        ("record_sha256", "V32"),
        ("width", "<u4"),
        ("height", "<u4"),
    ]
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
    """One of `SPLITS`: an index of `samples` rows, whose "shard" is an index into `shards`.

    `labelled` is False for images without annotations, which can only be predicted.
    """

    samples: int
    index: File
    shards: tuple[Shard, ...]
    labelled: bool = True

    @property
    def bytes(self) -> int:
        """Size of all its shards."""
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """A prepared data set: class names by label, and splits by name.

    `made` records its source and settings, for people and for a check that two data sets are equal.
    `domain` says what the samples are. Of detection, `categories` are as in the source (id, name,
    ...), in the order of the labels; `federated` means that an image may show objects of categories
    that nobody looked for in it, as in LVIS.
    """

    classes: tuple[str, ...]
    splits: dict[str, Split]
    made: dict[str, Any] = field(default_factory=dict)
    domain: str = CLASSIFICATION
    categories: tuple[dict[str, Any], ...] = ()
    federated: bool = False
    # What objects have besides boxes, in training and validation: "segmentation", "keypoints".
    holds: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        return 1 if self.domain == CLASSIFICATION else 2

    @property
    def row(self) -> np.dtype[Any]:
        """The rows of its indexes."""
        return ROW if self.version == 1 else RECORD_ROW

    def to_json(self) -> str:
        fields = asdict(self)
        if self.version == 1:  # which older versions of distdl read
            for name in ("domain", "categories", "federated", "holds"):
                del fields[name]
            for split in fields["splits"].values():
                del split["labelled"]
        return json.dumps({"format": FORMAT, "version": self.version, **fields}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """Parses the manifest at `where`; UserError if it is not one that this distdl reads."""
        try:
            fields = json.loads(text)
            form = fields["format"]
            version = fields["version"]
            if form == FORMAT and version > VERSION:
                raise UserError.at(
                    "data.root",
                    what=f"{where} was prepared by a newer distdl, as version {version}",
                    remedy="update distdl",
                    code="mismatch",
                )
            if form != FORMAT or version not in (1, VERSION):
                raise ValueError(f"format {form!r}, version {version!r}")
            splits = {}
            for name, split in fields["splits"].items():
                shards = tuple(Shard(**shard) for shard in split["shards"])
                labelled = bool(split.get("labelled", True))
                splits[name] = Split(split["samples"], File(**split["index"]), shards, labelled)
            classes = tuple(fields["classes"])
            made = fields["made"]
            if version == 1:
                return cls(classes, splits, made)
            domain = str(fields["domain"])
            categories = tuple(map(dict, fields["categories"]))
            holds = tuple(map(str, fields["holds"]))
            return cls(classes, splits, made, domain, categories, bool(fields["federated"]), holds)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError.at(
                "data.root",
                what=f"{where} is not a manifest of version {VERSION}: {error}",
                remedy="python -m distdl prepare ... writes one",
                code="wrong-kind",
            ) from error


def load_index(data: bytes, where: str, row: np.dtype[Any] = ROW) -> np.ndarray[Any, Any]:
    """Parses the content of the index file `where`; UserError if it does not hold `row`s."""
    try:
        rows = np.load(io.BytesIO(data), allow_pickle=False)
        if rows.dtype != row:
            raise ValueError(f"its rows are {rows.dtype}")
    except (ValueError, EOFError, OSError) as error:
        raise UserError.at(
            "data.root", what=f"{where} is not an index: {error}", code="damaged-file"
        ) from error
    return rows


@dataclass(frozen=True)
class ShardRecord:
    """What a domain knows about an image: a member of the tar beside it, whose name ends with
    `ending`. The other fields go into the index (`RECORD_ROW`)."""

    ending: str
    data: bytes
    label: int
    width: int
    height: int


class ShardFile:
    """Writes a tar file with two members per sample, `<key>.jpg` and `<key>.cls` or its record.

    The same samples give the same bytes, since it stores no times and no owners.

    `number` is the shard's index in its split; `row` is `Manifest.row`.
    """

    def __init__(self, file: BinaryIO, number: int, row: np.dtype[Any] = ROW) -> None:
        self._file = file
        self._number = number
        self._row = row
        self._hash = hashlib.sha256()
        self._offset = 0
        self._rows: list[tuple[Any, ...]] = []

    def add(self, key: str, extension: str, data: bytes, beside: int | ShardRecord) -> None:
        """Appends an encoded image and its label or record, according to `row`.

        `key` is at most 90 letters, digits, `_`, `-`.
        """
        label = beside if isinstance(beside, int) else beside.label
        offset, length, sha256 = self._member(key + extension, data)
        row: tuple[Any, ...] = (self._number, offset, length, label, sha256)
        if isinstance(beside, int):
            self._member(f"{key}.cls", str(label).encode())
        else:
            row += (*self._member(key + beside.ending, beside.data), beside.width, beside.height)
        self._rows.append(row)

    def close(self, name: str) -> tuple[Shard, np.ndarray[Any, Any]]:
        """Writes the end of the tar; returns the shard and its rows of the index (`ROW`)."""
        self._write(bytes(2 * BLOCK))
        rows = np.array(self._rows, dtype=self._row)
        return Shard(name, self._offset, self._hash.hexdigest(), len(rows)), rows

    def _member(self, name: str, data: bytes) -> tuple[int, int, bytes]:
        """Appends a member; returns its offset, length and sha256."""
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._write(info.tobuf(tarfile.USTAR_FORMAT))
        start = self._offset
        self._write(data)
        self._write(bytes(-len(data) % BLOCK))
        return start, len(data), hashlib.sha256(data).digest()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._offset += len(data)


def write_index(
    out: Path,
    split: str,
    shards: Sequence[Shard],
    rows: np.ndarray[Any, Any],
    labelled: bool = True,
    name: str = "",
) -> Split:
    """Writes a split's index, and returns the split's entry for the manifest. `name` is the file's;
    "": as the split's first index is called."""
    memory = io.BytesIO()
    np.save(memory, rows)
    data = memory.getvalue()
    name = name or f"{split}.index.npy"
    write_bytes(out / name, data)
    index = File(name, len(data), hashlib.sha256(data).hexdigest())
    return Split(len(rows), index, tuple(shards), labelled)
