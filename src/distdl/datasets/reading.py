"""Reads samples from shards, with one `pread` each, in a folder or in this node's cache."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import multiprocessing
import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distdl.datasets.cache import REMEDY, Cache, Evictable
from distdl.datasets.format import MANIFEST, ROW, File, Manifest, Split, load_index
from distdl.stores import PATIENCE, Absent, Store, StoreError, is_remote, open_store
from distdl.util.atomic_files import write_bytes
from distdl.util.errors import NoRoom, UserError
from distdl.util.wording import plural

QUICK = 10.0  # seconds to wait for a server if a kept manifest can replace its answer
AGAIN = "copy or prepare the data set again"
MOST_OPEN = 256  # shards that a process keeps open: the usual limit is 1,024 files
IMAGE, RECORD = "", "record_"  # what the columns of an index begin with


@dataclass(frozen=True)
class DataSet:
    """A prepared data set, in a folder or a store.

    `text` holds the manifest's bytes, `note` a warning about how it was opened, or "".
    """

    manifest: Manifest
    text: bytes
    store: Store
    note: str = ""

    @property
    def key(self) -> str:
        """The sha256 of the manifest."""
        return hashlib.sha256(self.text).hexdigest()

    def keep(self, cache_root: Path) -> None:
        """Writes the manifest into this node's cache, so that a run can start without a server."""
        write_bytes(_kept(cache_root, self.store), self.text, durable=False)

    @property
    def bytes(self) -> int:
        """Size of its shards and indexes."""
        return sum(split.bytes + split.index.bytes for split in self.manifest.splits.values())

    def index(self, split: str, cache: Cache | None) -> np.ndarray[Any, Any]:
        """The rows of a split.

        Raises:
            UserError: There is no such split, or its index is damaged.
        """
        file = self.split(split).index
        try:
            path = cache.fetch(file) if cache else Path(self.store.uri) / file.name
            data = path.read_bytes()
        except OSError as error:
            raise UserError.at(
                "data.root", what=f"{self.store.uri}: {error}", code="unreadable"
            ) from error
        if hashlib.sha256(data).hexdigest() != file.sha256:
            if cache is None:
                raise UserError.at(
                    "data.root",
                    what=f"{path} is not the index that {MANIFEST} describes",
                    remedy=AGAIN,
                    code="wrong-kind",
                )
            cache.drop(file)  # it was intact when it was downloaded
            data = cache.fetch(file).read_bytes()
        return load_index(data, str(path), self.manifest.row)

    def split(self, name: str) -> Split:
        if name not in self.manifest.splits:
            has = ", ".join(self.manifest.splits)
            raise UserError.at(
                "data.root",
                what=f"{self.store.uri} has no {name!r}, only: {has}",
                code="incomplete",
            )
        return self.manifest.splits[name]


def open_data_set(
    root: str, *, patience: float = PATIENCE, cache_root: Path | None = None
) -> DataSet:
    """Reads the manifest at a folder or URI.

    Args:
        patience: Seconds to keep trying while a server does not answer.
        cache_root: This node's cache. If the server cannot be reached, the manifest that
            `DataSet.keep` wrote there is used.

    Raises:
        UserError: There is no manifest, or the store cannot be reached.
    """
    store = open_store(root, patience=patience)
    kept = _kept(cache_root, store) if cache_root and is_remote(root) else None
    if kept is not None and not kept.exists():
        kept = None
    try:  # wait only briefly if the kept manifest can replace the server's
        source = open_store(root, patience=min(patience, QUICK)) if kept else store
        text = source.read(MANIFEST)
    except StoreError as error:
        if kept is not None and error.transient:
            date = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.stat().st_mtime))
            note = f"{store.uri} cannot be reached; the copy of {date} is used ({kept})"
            return _data_set(kept.read_bytes(), store, note)
        remedy = error.remedy
        if isinstance(error, Absent):
            remedy = "finish the upload: python -m distdl prepare ... --upload URL"
        raise UserError.at("data.root", what=str(error), remedy=remedy, code=error.code) from error
    return _data_set(text, store)


def _kept(cache_root: Path, store: Store) -> Path:
    name = hashlib.sha256(store.address.encode()).hexdigest()[:16]
    return cache_root / "manifests" / f"{name}.json"


def _data_set(text: bytes, store: Store, note: str = "") -> DataSet:
    manifest = Manifest.from_json(text, f"{store.uri}/{MANIFEST}")
    for split in manifest.splits.values():
        for file in (split.index, *split.shards):
            if Path(file.name).name != file.name or file.name.startswith("."):
                raise UserError.at(
                    "data.root", what=f"{file.name!r} is not a name of a shard", code="wrong-type"
                )
    return DataSet(manifest, text, store, note)


class Shards:
    """The samples of one split, as bytes: their images, and their records if they have some.

    A sample is compared with its sha256 when it is first read, and again if its file has changed
    since. Only intact samples are remembered, so damage is found in each epoch. The memory of them
    is shared with a loader's workers and lasts as long as this process.

    Args:
        cache: This node's cache; None: `data` is a folder that is read in place.
        evictable: As for `Cache.fetch`.
    """

    def __init__(
        self,
        data: DataSet,
        split: str,
        cache: Cache | None = None,
        evictable: Evictable | None = None,
    ) -> None:
        self.split = data.split(split)
        self.cache = cache
        self.key = data.key
        self.classes = data.manifest.classes
        self.folder = Path(data.store.uri) if cache is None else cache.folder
        self.evictable = evictable
        self.rows = data.index(split, cache)
        # For each sample, the file state in which it was found intact; 0: none yet.
        count = len(self.rows)
        parts = parts_of(data.manifest)
        self._intact = {p: multiprocessing.RawArray(ctypes.c_uint32, count) for p in parts}
        self._lost: UserError | None = None
        self._open: OrderedDict[int, int] = OrderedDict()
        self._most_open = MOST_OPEN
        refuse_misfit(self.rows, data, split)

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def for_thread(self, threads: int) -> Shards:
        """The same samples for one of so many threads, with files and a connection of its own. What
        was found intact is known to all."""
        shards = copy.copy(self)
        shards._most_open = max(16, MOST_OPEN // threads)
        if self.cache is not None:
            shards.cache = copy.copy(self.cache)
            shards.cache.store = copy.copy(self.cache.store)
        return shards

    def __del__(self) -> None:
        for handle in getattr(self, "_open", {}).values():
            os.close(handle)

    def file(self, index: int) -> File:
        return self.split.shards[self.rows["shard"][index]]

    def read(self, index: int) -> bytes:
        """The encoded image of a sample. A damaged shard in the cache is downloaded again.

        Raises:
            ValueError: The sample does not fit the index, and its shard cannot be repaired.
            UserError: The shard is missing, or cannot be downloaded.
        """
        return self._read(index, IMAGE)

    def record(self, index: int) -> bytes:
        """The record of a sample; raises as `read` does."""
        return self._read(index, RECORD)

    def _read(self, index: int, part: str) -> bytes:
        handle = self._handle(int(self.rows["shard"][index]))
        intact = self._intact[part]
        before = _state(handle)
        data = self._pread(handle, index, part)
        same = _state(handle) == before
        length: int = self.rows[f"{part}bytes"][index]
        if same and intact[index] == before and len(data) == length:
            return data
        if self.is_intact(index, data, part):
            if same:
                intact[index] = before
            return data
        if not self.repair(index, part):
            raise ValueError("its bytes are not those that were prepared: the shard is damaged")
        return self._read(index, part)

    def _pread(self, handle: int, index: int, part: str) -> bytes:
        row = self.rows[index]
        return os.pread(handle, int(row[f"{part}bytes"]), int(row[f"{part}offset"]))

    def is_intact(self, index: int, data: bytes, part: str = IMAGE) -> bool:
        return hashlib.sha256(data).digest() == self.rows[f"{part}sha256"][index].tobytes()

    def repair(self, index: int, part: str = IMAGE) -> bool:
        """If the cached copy of a sample is damaged, drops its shard from the cache.

        The next read then downloads it again. Returns whether the copy was damaged.
        """
        number = int(self.rows["shard"][index])
        data = self._pread(self._handle(number), index, part)
        if self.cache is None or self.is_intact(index, data, part):
            return False
        path = self.cache.path(self.file(index))
        handle = self._open.pop(number)
        # Drop only the copy that we read: another process may have replaced it already.
        same = path.exists() and os.path.samestat(os.fstat(handle), path.stat())
        os.close(handle)
        if same:
            self.cache.drop(self.file(index))
        return True

    def member(self, index: int) -> str:
        """Where a sample is, as "shard:member" with the member's name as `tar` shows it."""
        row = self.rows[index]
        header = os.pread(self._handle(int(row["shard"])), 100, int(row["offset"]) - 512)
        name = header.rstrip(b"\0").decode("utf-8", "replace")
        return f"{self.folder / self.file(index).name}:{name}"

    def _handle(self, number: int) -> int:
        """File descriptor of an open shard."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        self._close_some()
        file = self.split.shards[number]
        while True:
            try:
                self._open[number] = os.open(self._path(file), os.O_RDONLY)
                return self._open[number]
            except FileNotFoundError:
                if self.cache is None:
                    raise UserError.at(
                        "data.root",
                        what=f"{self.folder / file.name} is missing",
                        remedy=AGAIN,
                        code="incomplete",
                    ) from None
                # Another process evicted the copy before it was opened: fetch it again.

    def _path(self, file: File) -> Path:
        if self.cache is None:
            return self.folder / file.name
        if self._lost is not None and not self.cache.has(file):
            raise self._lost  # the run ends, so a worker's next batches need not wait
        try:
            return self.cache.fetch(file, self.evictable)
        except NoRoom as error:
            raise UserError.at(
                "data.cache_dir", what=str(error), remedy=REMEDY, code="not-enough"
            ) from error
        except UserError as error:
            self._lost = error
            raise

    def _close_some(self) -> None:
        """Closes the least recently used shards, and removed ones, to free their disk space."""
        if self.cache is not None and self.evictable is not None:
            for number, handle in list(self._open.items()):
                if os.fstat(handle).st_nlink == 0:
                    os.close(self._open.pop(number))
        while len(self._open) >= self._most_open:
            os.close(self._open.popitem(last=False)[1])


def parts_of(manifest: Manifest) -> tuple[str, ...]:
    """What is stored of a sample: its image, and in version 2 its record."""
    return (IMAGE,) if manifest.row == ROW else (IMAGE, RECORD)


def _state(handle: int) -> int:
    """A number, never 0, that changes when a file is replaced or written to; takes 1 us.

    It includes the ctime, since a copy over the file may restore its mtime.
    """
    stat = os.fstat(handle)
    state = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    return hash(state) & 0xFFFFFFFF or 1


def refuse_misfit(rows: np.ndarray[Any, Any], data: DataSet, split: str) -> None:
    """Raises UserError if an index does not fit the manifest's split: its number of samples and
    classes, the order of its shards, and their ends."""
    described = data.split(split)
    classes = len(data.manifest.classes)
    shard = rows["shard"].astype(np.int64)
    counted = np.bincount(shard, minlength=len(described.shards)).tolist()
    labels = rows["label"]
    beyond = labels[(labels < 0) | (labels >= classes)] if data.manifest.row == ROW else labels[:0]
    if len(rows) != described.samples:
        misfit = f"holds {len(rows)} samples, {MANIFEST} lists {described.samples}"
    elif len(beyond):
        names = f"{classes} {plural('class', classes)}"
        misfit = f"holds label {beyond.max()}, {MANIFEST} names {names}"
    elif counted != [each.samples for each in described.shards] or np.any(np.diff(shard) < 0):
        misfit = f"does not fit the shards of {MANIFEST}"
    else:
        sizes = np.array([each.bytes for each in described.shards], np.uint64)
        ends = [rows[f"{p}offset"] + rows[f"{p}bytes"] for p in parts_of(data.manifest)]
        if all(np.all(end <= sizes[shard]) for end in ends):
            return
        misfit = f"has bytes beyond the ends of {MANIFEST}'s shards"
    raise UserError.at(
        "data.root",
        what=f"{data.store.uri}: the index of {split!r} {misfit}",
        remedy=AGAIN,
        code="mismatch",
    )
