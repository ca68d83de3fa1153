"""What a prepared data set is: `dataset.json`, one index per split, and tar files.

    dataset.json             the manifest, written last: without it there is no data set
    train.index.npy          one row per sample (`ROW`), in the order of the shards
    train-00000.tar          n01440764_10026.jpg, n01440764_10026.cls, ... (webdataset's own names)
    val.index.npy, val-00000.tar

The index makes one `pread` of one sample: no tar is ever scanned. A tar is complete in itself, so
that any reader of webdatasets reads it, too (https://github.com/webdataset/webdataset).
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from distdl.util.errors import UserError

MANIFEST = "dataset.json"
WORK = ".preparing"  # a folder that `distdl prepare` removes when the data set is complete
FORMAT, VERSION = "distdl-shards", 1

# Where the encoded image of a sample is, its label, and the sha256 of its bytes.
ROW = np.dtype(
    [("shard", "<u4"), ("offset", "<u8"), ("bytes", "<u4"), ("label", "<i4"), ("sha256", "V32")]
)


@dataclass(frozen=True)
class File:
    """A file of a data set: its name beside the manifest, its length, its sha256 in hexadecimal."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard(File):
    """A tar file.

    Args:
        samples: How many it holds.
    """

    samples: int


@dataclass(frozen=True)
class Split:
    """ "train" or "val": an index of `samples` rows, whose `shard` is a place in `shards`."""

    samples: int
    index: File
    shards: tuple[Shard, ...]

    @property
    def bytes(self) -> int:
        """Of all its shards."""
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """A prepared data set.

    Args:
        classes: Names; a class's place is its label.
        splits: By name.
        made: What it was made from and how (for people, and to refuse to mix two data sets).
    """

    classes: tuple[str, ...]
    splits: dict[str, Split]
    made: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """Raises UserError when `where` (for the message) is no manifest that we can read."""
        try:
            found = json.loads(text)
            if found["format"] == FORMAT and found["version"] > VERSION:
                what = f"{where} was prepared by a newer distdl, as version {found['version']}"
                raise UserError.at("data.root", what, "update distdl")
            if found["format"] != FORMAT or found["version"] != VERSION:
                raise ValueError(f"format {found['format']!r}, version {found['version']!r}")
            splits = {
                name: Split(
                    split["samples"],
                    File(**split["index"]),
                    tuple(Shard(**shard) for shard in split["shards"]),
                )
                for name, split in found["splits"].items()
            }
            return cls(tuple(found["classes"]), splits, found["made"])
        except (ValueError, KeyError, TypeError) as error:
            what = f"{where} is no manifest of version {VERSION}: {error}"
            remedy = "python -m distdl prepare ... writes one"
            raise UserError.at("data.root", what, remedy) from error


def load_index(data: bytes, where: str) -> np.ndarray[Any, Any]:
    """The rows of an index file's content.

    Raises:
        UserError: `data` holds no rows of `ROW`.
    """
    try:
        rows = np.load(io.BytesIO(data), allow_pickle=False)
        if rows.dtype != ROW:
            raise ValueError(f"its rows are {rows.dtype}")
    except (ValueError, EOFError, OSError) as error:
        raise UserError.at("data.root", f"{where} is no index: {error}") from error
    return rows
