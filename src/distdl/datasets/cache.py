"""This node's cache of shards: each is downloaded once, checked, and kept while there is room.

    CACHE/<data set>/train-00000.tar     complete and checked; unfinished files never have this name
    CACHE/<data set>/.<name>.<id>.part   being downloaded
    CACHE/<data set>/locks/              one lock per shard: its holder downloads the shard
    CACHE/<data set>/locks/unreachable   the server did not answer; removed when it does
    CACHE/lock                           held while disk space is reserved or freed

Locks are the kernel's (flock), so they end with the process that holds them. One cache can be used
by all ranks of a node, by other runs, and by nodes that share a disk with locks (NFSv4, Lustre with
-o flock).
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from distdl.datasets.format import File
from distdl.stores import Progress, Store
from distdl.stores.files import reserved
from distdl.util.atomic_files import sync, write_bytes
from distdl.util.digests import sha256_of
from distdl.util.errors import NoRoom, StoreError, UserError

log = logging.getLogger(__name__)

Evictable = Callable[[File], Sequence[str]]

TRIES = 3
AGAIN = 10.0  # seconds to wait for a server that another process of this node has given up on
MARGIN = 2 << 30  # bytes of the disk that stay free; on a small disk, a twentieth of it


class Cache:
    """Copies of one data set's files.

    Args:
        root: A folder that all data sets share; created if needed.
        key: Identifies the data set: the sha256 of its manifest.
        limit: Bytes for all of `root`; None: limited by the disk.
    """

    def __init__(self, store: Store, root: Path, key: str, limit: int | None = None) -> None:
        self.store = store
        self.root = root
        self.limit = limit
        self.folder = root / key[:16]
        self._since = time.time()
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            # Held by every process that reads, so that other runs do not remove this data set.
            self._used = os.open(self.folder / "locks" / "in_use", os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(self._used, fcntl.LOCK_SH)
            os.utime(self._used)
        except OSError as error:
            raise UserError.at(
                "data.cache_dir",
                what=f"cannot keep shards in {self.root}: {error.strerror}",
                remedy=REMEDY,
                code="unsupported",
            ) from error

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_used": None}

    def path(self, file: File) -> Path:
        return self.folder / file.name

    def has(self, file: File) -> bool:
        try:
            return os.stat(self.path(file)).st_size == file.bytes
        except FileNotFoundError:
            return False

    def fetch(
        self,
        file: File,
        evictable: Evictable | None = None,
        progress: Progress | None = None,
    ) -> Path:
        """Path of the file's complete and checked copy; downloads it if it is not cached.

        Waits if another process is downloading it. The copy may be evicted later, so the caller
        should open it at once: an open file stays readable.

        Args:
            file: Its name, length and sha256.
            evictable: Returns the names of copies that may be evicted for a file, beginning with
                the one that is needed last.
            progress: As for `Store.download`.

        Raises:
            NoRoom: The disk or the cache is full, even without the evictable copies.
            UserError: The file arrived damaged TRIES times, or the server does not answer.
        """
        if self.has(file):
            return self.path(file)
        asked = time.time()
        with FileLock(self.folder / "locks" / file.name):
            if self.has(file):
                return self.path(file)
            self._raise_known_outage(asked)
            if self.path(file).exists():
                log.warning(DOWNLOADED_AGAIN, self.path(file))
            for _ in range(TRIES):
                # We hold the lock, so a killed process left these.
                for left in self.folder.glob(f".{file.name}.*.part"):
                    left.unlink(missing_ok=True)
                part = self.folder / f".{file.name}.{uuid.uuid4().hex[:8]}.part"
                try:
                    self._reserve(part, file, evictable)
                    self.store.download(file.name, part, self._ending_on_outage(asked, progress))
                    damage = difference(part, file)
                    if not damage:
                        with FileLock(self.root / "lock"):  # so that `_total` counts the file once
                            part.rename(self.path(file))
                        sync(self.folder)
                        return self.path(file)
                except StoreError as error:
                    if error.transient:
                        write_bytes(self._outage, str(error).encode(), durable=False)
                    raise _failed(str(error), error.code) from error
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    raise self._full(file) from error  # perhaps others wrote to the disk
                finally:
                    part.unlink(missing_ok=True)
        raise UserError.at(
            "data.root",
            what=f"{self.store.uri}/{file.name} arrived damaged {TRIES} times: {damage}",
            remedy=DAMAGED,
            code="damaged-file",
        )

    @property
    def _outage(self) -> Path:
        return self.folder / "locks" / "unreachable"

    def _raise_known_outage(self, since: float) -> None:
        """Raises UserError if another process has given up on the server since `since`."""
        with suppress(FileNotFoundError):
            if self._outage.stat().st_mtime >= since:
                raise _failed(self._outage.read_text(), "unreachable")

    def _ending_on_outage(self, asked: float, progress: Progress | None) -> Progress:
        """Wraps `progress` so that the download ends when another process of this node gives up.

        In the first AGAIN seconds only outages that were reported after `asked` count.
        """

        def called(count: int) -> None:
            if count:  # the server answers
                self._outage.unlink(missing_ok=True)
            else:
                self._raise_known_outage(self._since if time.time() - asked > AGAIN else asked)
            if progress is not None:
                progress(count)

        return called

    def drop(self, file: File) -> None:
        """Removes a copy that turned out to be damaged."""
        log.warning(DOWNLOADED_AGAIN, self.path(file))
        with FileLock(self.folder / "locks" / file.name):
            self.path(file).unlink(missing_ok=True)

    def room(self) -> int:
        """Bytes that this data set may take: free space, its own copies, and unused data sets."""
        usable = sum(map(_size, (self.folder, *self._unused())))
        disk = self._free() + usable
        return disk if self.limit is None else min(disk, self.limit - self._total() + usable)

    def _reserve(self, part: Path, file: File, evictable: Evictable | None) -> None:
        """Reserves disk space for a file, and makes room for it."""
        with FileLock(self.root / "lock"):
            if self._lacking(file.bytes) > 0:
                others = (
                    folder / copy.name for folder in self._unused() for copy in _copies(folder)
                )
                names = evictable(file) if evictable else ()
                ours = (self.folder / name for name in names if name != file.name)
                for path in itertools.chain(others, ours):
                    path.unlink(missing_ok=True)
                    if self._lacking(file.bytes) <= 0:
                        break
                else:
                    raise self._full(file)
            with reserved(part, file.bytes):
                pass

    def _lacking(self, wanted: int) -> int:
        """Bytes to free before `wanted` more bytes fit."""
        lacking = wanted - self._free()
        return lacking if self.limit is None else max(lacking, self._total() + wanted - self.limit)

    def _free(self) -> int:
        disk = shutil.disk_usage(self.root)
        return disk.free - min(MARGIN, disk.total // 20)

    def _total(self) -> int:
        return sum(map(_size, self._folders()))

    def _folders(self) -> list[Path]:
        return [path for path in self.root.iterdir() if (path / "locks").is_dir()]

    def _unused(self) -> list[Path]:
        """Folders of other data sets that no process reads, the longest unused first."""
        others = [f for f in self._folders() if f != self.folder and not _in_use(f)]
        return sorted(others, key=lambda folder: (folder / "locks" / "in_use").stat().st_mtime)

    def _full(self, file: File) -> NoRoom:
        free = shutil.disk_usage(self.root).free
        limit = "" if self.limit is None else f" (data.cache_gb: {self.limit / 1e9:g} GB)"
        text = f"no room for {file.name} ({file.bytes / 1e6:.1f} MB) in {self.root}{limit}: "
        return NoRoom(errno.ENOSPC, f"{text}the disk has {free / 1e6:,.0f} MB left")


DOWNLOADED_AGAIN = "%s is damaged: it is downloaded again"
REMEDY = "data.cache_dir=/a/larger/disk, or data.cache_gb=N for fewer shards at a time"
DAMAGED = "upload it again (python -m distdl prepare ... --upload), then resume this run"


def _failed(message: str, code: str) -> UserError:
    return UserError.at(
        "data.root",
        what=message,
        remedy="resume the run when the server is back" if code == "unreachable" else "",
        code=code,
    )


def difference(path: Path, file: File) -> str:
    """How a copy differs from the manifest's entry, "" if it does not."""
    size = path.stat().st_size
    if size != file.bytes:
        return f"it has {size} bytes instead of {file.bytes}"
    sha256 = sha256_of(path)
    return "" if sha256 == file.sha256 else f"its sha256 is {sha256[:12]}..., not {file.sha256}"


def _in_use(folder: Path) -> bool:
    try:
        with (folder / "locks" / "in_use").open("r+b") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False


def _copies(folder: Path) -> list[os.DirEntry[str]]:
    """A data set's files, also unfinished ones, since they take space, too."""
    return [entry for entry in os.scandir(folder) if entry.is_file()]


def _size(folder: Path) -> int:
    size = 0
    for entry in _copies(folder):
        with suppress(FileNotFoundError):  # removed by another process
            size += entry.stat().st_size
    return size
