"""Sources that `prepare` reads: a source lists its samples cheaply, and reads their bytes later.

A source is a module of this package (or of yours) with two functions::

    def add_options(parser: argparse.ArgumentParser) -> None   # its own options, if any
    def open_source(options: argparse.Namespace) -> Source     # checks them; options.source is DIR
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from distdl.datasets.image_files import EXTENSIONS, is_image
from distdl.datasets.left_out import NO_IMAGE, LeftOut
from distdl.domains.record import Annotation, SampleRecord
from distdl.stores.walking import walk_once
from distdl.util.errors import Problem, Unfinished

# By the word after `prepare`: the module, and a line for --help.
KINDS = {
    "imagenet": ("distdl.tools.prepare.imagenet", "ILSVRC2012, as its two tar files"),
    "folder": ("distdl.tools.prepare.folder", "DIR/train/<class>/*.jpg and DIR/val/<class>/*.jpg"),
    "tfrecord": (
        "distdl.tools.prepare.tfrecord",
        "TFRecords of tf.train.Example, like Inception's",
    ),
    "coco": ("distdl.tools.prepare.coco", "COCO, or a set in its format: boxes, masks, keypoints"),
    "parquet": ("distdl.tools.prepare.parquet", "Parquet with encoded images, also Petastorm's"),
}

# progress(done, total): how much is done, mostly in bytes.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One image of a source, unread."""

    split: str  # "train" or "val"
    name: str  # its file name, or a path, not always unique; its key in the shards is made from it
    label: int  # index of its class in the source's `classes`
    bytes: int  # size of the encoded image; an estimate will do
    where: tuple[str | int, ...]  # its location, for `read`; stored as JSON
    mtime_ns: int = 0  # its file's mtime when it was planned, for `refuse_changed`; 0: unknown


class Source(Protocol):
    """Images with labels, in any form. It is pickled to the processes that read it.

    A source of another domain than classification is an `Annotated` one. `notes`, which a source
    may have, are lines for the user, complete at the end of `scan`.
    """

    kind: str
    # Names by label; complete at the end of `scan`.
    classes: list[str]
    # Whether samples are stored in blocks that can only be read at once (a row group of Parquet).
    # Samples of one block have the same `where`, except for its last item.
    in_blocks: bool
    # What `scan` passes over; complete at its end. A source may lack it.
    left_out: LeftOut

    def scan(self, progress: Progress) -> Iterator[Sample]:
        """Every sample, in the same order each time. Reads headers, but no images.

        Raises:
            UserError: A file is invalid; the error names it, and says what to do.
        """
        ...

    def read(self, sample: Sample) -> bytes:
        """The encoded image. Called in other processes, so it must open files there.

        If interrupted work is continued, `scan` was not called before.

        Raises:
            OSError: It cannot be read.
            ValueError: It is damaged.
            Unfinished: Its file has changed since it was planned.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Identifies this source, as JSON: names and sizes, but no absolute paths.

        It is stored in the manifest, and compared before interrupted work is continued. It is
        called before `scan`, and must be cheap.
        """
        ...


class Annotated(Source, Protocol):
    """Images of which more is known than a label: each gets a record beside it."""

    # Its domain's; the manifest names the domain.
    record: SampleRecord

    @property
    def contents(self) -> dict[str, Any]:
        """What else the manifest says: "categories", "federated" and "holds" (`format.Manifest`),
        and the splits that are "unlabelled". Complete at the end of `scan`."""
        ...

    def refuse_known(self, out: Path) -> None:
        """Called after `scan`, if the samples are to be added to the data set in a folder. A source
        may lack it.

        Raises:
            UserError: Some of them cannot be told from those that are there.
        """
        ...

    def annotation(self, sample: Sample) -> Annotation:
        """What is known of an image, for `SampleRecord.encode`. Called as `read` is, and raises the
        same."""
        ...


def record_of(source: Source) -> SampleRecord | None:
    """The record of an `Annotated` source; None: it has labels alone."""
    return getattr(source, "record", None)


def no_folder(path: Path, remedy: str) -> Problem:
    """The problem of a --source that is not a folder."""
    if path.exists():
        return Problem(
            "--source", what=f"{path} is a file, not a folder", remedy=remedy, code="wrong-kind"
        )
    return Problem("--source", what=f"no such folder: {path}", remedy=remedy, code="not-found")


def refuse_changed(
    path: Path, stat: os.stat_result, mtime_ns: int, size: int | None = None
) -> None:
    """Refuses a file whose mtime or size (None: unknown) has changed since it was planned.

    Call it after reading, so that it also notices a change during the read. `stat` is the file's
    current state; `mtime_ns` 0 is unknown.

    Raises:
        Unfinished: It has changed.
    """
    if not mtime_ns or (stat.st_mtime_ns == mtime_ns and size in (None, stat.st_size)):
        return
    raise Unfinished.at(
        "--source",
        what=f"{path} has changed since it was planned: other bytes would go into the data set",
        remedy=(
            "restore the file with its old time (cp -p) and repeat the command; or, to prepare the "
            "changed files, use the same command with another --to"
        ),
        code="mismatch",
    )


def files_below(
    folder: Path,
    left_out: LeftOut,
    endings: tuple[str, ...] = EXTENSIONS,
) -> Iterator[Path]:
    """Files with certain `endings` (in lower case), sorted, also in subfolders, except hidden ones.

    `left_out` counts the others. Raises OSError if a folder cannot be read.
    """
    for inner, folders, names in walk_once(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in sorted(names):
            if is_image(name, endings):
                yield Path(inner, name)
            elif not name.startswith("."):
                left_out.add(name, NO_IMAGE)


class Files:
    """Reads parts of files below `folder`. Each process keeps up to `limit` of them open."""

    def __init__(self, folder: Path, limit: int = 64) -> None:
        self.folder = folder
        self.limit = limit
        self._open: dict[str, int] = {}

    def read(self, name: str, offset: int, length: int, mtime_ns: int = 0) -> bytes:
        """`length` bytes from `offset` on; OSError if the file is too short."""
        if name not in self._open:
            if len(self._open) >= self.limit:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[name] = os.open(self.folder / name, os.O_RDONLY)
        data = os.pread(self._open[name], length, offset)
        refuse_changed(self.folder / name, os.fstat(self._open[name]), mtime_ns)
        if len(data) != length:
            raise OSError(f"{name} ends at byte {offset + len(data)} of {offset + length}")
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "limit": self.limit, "_open": {}}
