"""What `prepare` can read: a source lists its samples cheaply, and hands out their bytes later.

A source is a module of this package (or of yours) with two functions::

    def add_options(parser: argparse.ArgumentParser) -> None   # options of its own, if any
    def open_source(options: argparse.Namespace) -> Source     # checks them; options.source is DIR
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from distdl.datasets.image_files import EXTENSIONS, is_image
from distdl.stores.walking import walk_once
from distdl.util.errors import Unfinished

# By the word after `prepare`: the module, and one line for --help.
KINDS = {
    "imagenet": ("distdl.datasets.imagenet", "ILSVRC2012, as its two tar files"),
    "folder": ("distdl.datasets.folder", "DIR/train/<class>/*.jpg and DIR/val/<class>/*.jpg"),
    "tfrecord": ("distdl.datasets.tfrecord", "TFRecords of tf.train.Example, as Inception's"),
    "parquet": ("distdl.datasets.parquet", "Parquet with encoded images, also Petastorm's"),
}

# progress(done, total): how much of something (mostly bytes) is done.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One image of a source, unread.

    Args:
        split: "train" or "val".
        name: The image's file name, "n01440764_10026.JPEG", or a path: its key in the shards is
            made from it. Need not be unique.
        label: Its class's place in the source's `classes`.
        bytes: Of the encoded image; an estimate will do.
        where: What `read` needs to find it: strings and numbers only, since a plan is kept as JSON.
        mtime_ns: Time of change of its file when it was planned: `read` ends with
            `refuse_changed` if that is another one now. 0: it is not compared.
    """

    split: str
    name: str
    label: int
    bytes: int
    where: tuple[str | int, ...]
    mtime_ns: int = 0


class Source(Protocol):
    """Images with labels, in whatever form. It is pickled to the processes that read it."""

    kind: str
    # Names by label; complete when `scan` has come to its end.
    classes: list[str]
    # Whether samples that lie together must be read together, since one cannot be read alone (a
    # row group of Parquet): `where` without its last item says which those are.
    in_blocks: bool

    def scan(self, progress: Progress) -> Iterator[Sample]:
        """Every sample, in the same order each time. Reads headers, no images.

        Raises:
            UserError: What is there is not what it should be; says which file, and what to do.
        """
        ...

    def read(self, sample: Sample) -> bytes:
        """The encoded image. Called in other processes: files are opened there, when needed.

        Where interrupted work is continued, `scan` was not called before.

        Raises:
            OSError: It cannot be read.
            ValueError: What was read is damaged.
            Unfinished: Its file is not the one that was planned.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """What identifies this source, as JSON: names and sizes, no absolute paths.

        It is kept in the manifest, and compared before interrupted work is continued; so it must be
        cheap, and is called before `scan`.
        """
        ...


def no_folder(path: Path) -> str:
    """What is wrong with a path that should be a folder."""
    return f"{path} is a file, and no folder" if path.exists() else f"no such folder: {path}"


def refuse_changed(
    path: Path, stat: os.stat_result, mtime_ns: int, size: int | None = None
) -> None:
    """Called after reading, so that a change meanwhile is noticed, too.

    Args:
        path: Of a file.
        stat: Of the file now.
        mtime_ns: When it had last been changed as it was planned; 0: not known.
        size: Its bytes then; None: not known.

    Raises:
        Unfinished: It was written to after that, or is another file.
    """
    if not mtime_ns or (stat.st_mtime_ns == mtime_ns and size in (None, stat.st_size)):
        return
    what = f"{path} has changed since it was planned: other bytes would go into the data set"
    remedy = (
        "put it back as it was (cp -p), and the same command continues; to prepare what "
        "the files are now: the same command with another --to"
    )
    raise Unfinished.at("--source", what, remedy)


def files_below(
    folder: Path,
    endings: tuple[str, ...] = EXTENSIONS,
    walk: Iterable[tuple[str, list[str], list[str]]] | None = None,
) -> Iterator[Path]:
    """Sorted, also in folders inside, without the hidden ones.

    Args:
        folder: Where to look.
        endings: Of their names, in lower case.
        walk: Through `folder`; None: `walk_once`.

    Raises:
        OSError: A folder cannot be read.
    """
    for inner, folders, names in walk or walk_once(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in sorted(names):
            if is_image(name, endings):
                yield Path(inner, name)


class Files:
    """Parts of files below a folder. The last few files stay open, in each process its own.

    Args:
        folder: What the names are relative to.
        limit: How many are open at most.
    """

    def __init__(self, folder: Path, limit: int = 64) -> None:
        self.folder, self.limit = folder, limit
        self._open: dict[str, int] = {}

    def read(self, name: str, offset: int, length: int, mtime_ns: int = 0) -> bytes:
        """Raises OSError when the file is shorter than that, and as `refuse_changed` does."""
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
