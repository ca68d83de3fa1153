"""A folder as a store: on a disk or a mount (NFS, blobfuse)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distdl.stores.store import Progress
from distdl.stores.walking import walk_once
from distdl.util.atomic_files import atomic_file
from distdl.util.errors import StoreError, UserError

_PIECE = 8 << 20  # bytes copied at a time
_MOST = 4 << 30  # bytes of a file that is read at once


@dataclass(frozen=True)
class FileStore:
    """The files of one folder, which may be absent until a file is uploaded."""

    folder: Path

    @property
    def uri(self) -> str:
        return str(self.folder)

    @property
    def address(self) -> str:
        return self.uri

    def size(self, name: str) -> int | None:
        path = self.folder / name
        try:
            return path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error

    def read(self, name: str) -> bytes:
        try:
            return read_file(self.folder / name)
        except OSError as error:
            raise StoreError(f"{self.folder / name}: {error.strerror}") from error

    def read_part(self, name: str, start: int, count: int) -> bytes:
        try:
            with regular(self.folder / name) as file:
                data = os.pread(file, count, start)
        except OSError as error:
            raise StoreError(f"{self.folder / name}: {error.strerror}") from error
        if len(data) != count:
            raise StoreError(f"{self.folder / name}: {len(data)} of {count} bytes are there")
        return data

    def download(self, name: str, to: Path, progress: Progress | None = None) -> None:
        try:
            source = (self.folder / name).open("rb")
        except OSError as error:
            raise StoreError(f"{self.folder / name}: {error.strerror}") from error
        start = 0
        with source, reserved(to, os.fstat(source.fileno()).st_size) as target:
            while piece := source.read(_PIECE):
                write_at(target, piece, start)
                start += len(piece)
                if progress is not None:
                    progress(len(piece))
            os.fsync(target)

    def upload(self, path: Path, name: str, progress: Progress | None = None) -> None:
        target = self.folder / name
        try:
            if target.exists():
                raise FileExistsError
            with atomic_file(target, replace=False) as file:
                FileStore(path.parent).download(path.name, Path(file.name), progress)
        except FileExistsError:
            raise StoreError(f"{target} exists already") from None

    def replace(self, path: Path, name: str) -> None:
        try:
            with atomic_file(self.folder / name) as file:
                FileStore(path.parent).download(path.name, Path(file.name))
        except OSError as error:
            raise StoreError(f"{self.folder / name}: {error.strerror}") from error

    def remove(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self.folder / name}: {error.strerror}") from error

    def names(self, prefix: str = "") -> Iterator[str]:
        paths = []
        try:
            for inner, _, files in walk_once(self.folder) if self.folder.exists() else ():
                below = os.path.relpath(inner, self.folder)
                # A killed upload leaves a hidden file.
                paths += [os.path.join(below, file) for file in files if not file.startswith(".")]
        except OSError as error:
            raise StoreError(f"{error.filename}: {error.strerror}") from error
        names = map(os.path.normpath, paths)
        return iter(sorted(name for name in names if name.startswith(prefix)))


@contextmanager
def regular(path: str | Path) -> Iterator[int]:
    """Yields the descriptor of a file to read.

    Raises:
        OSError: It cannot be read, or is not a regular file: a pipe may never end.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file
    finally:
        os.close(file)


def read_file(path: str | Path, most: int | None = None) -> bytes:
    """The content of a file, or its first `most` bytes.

    Raises:
        OSError: As `regular`; or the file is far larger than any image.
    """
    with regular(path) as file, open(file, "rb", closefd=False) as content:
        if most is None and os.fstat(file).st_size > _MOST:
            raise OSError(errno.EFBIG, f"larger than {_MOST >> 30} GiB", str(path))
        return content.read(-1 if most is None else most)


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Turns an OSError or StoreError in the block into a UserError with the path `where`."""
    try:
        yield
    except StoreError as error:
        raise UserError.at(where, what=str(error), remedy=error.remedy, code=error.code) from error
    except OSError as error:
        if not error.filename:
            raise
        raise UserError.at(
            where,
            what=f"{error.filename} cannot be read: {error.strerror}",
            remedy="the user who runs this needs the right to read it, and to enter its folder",
            code="unreadable",
        ) from error


@contextmanager
def reserved(path: Path, size: int) -> Iterator[int]:
    """Yields the descriptor of a file to write, with disk space reserved for `size` bytes.

    So a full disk is noticed before the download, and two downloads cannot use the same space.

    Raises:
        OSError: ENOSPC, the disk is full.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(file, size)
        if size and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # not supported here
                    raise
        yield file
    finally:
        os.close(file)


def write_at(file: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, start)
        view = view[written:]
        start += written
