"""Base of the network stores: one client per process, retries, parallel downloads."""

from __future__ import annotations

import functools
import logging
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from distdl.stores.files import reserved, write_at
from distdl.stores.store import PATIENCE, Progress
from distdl.util.errors import Absent, Short, StoreError
from distdl.util.redact import hide_shapes

PART = 8 << 20  # bytes per request
THREADS = 8  # requests of one file at a time; one connection to Blob gives about 60 MB/s

LONG = 30.0  # seconds: an outage is logged only if `patience` is at least this long

T = TypeVar("T")
C = TypeVar("C")  # the client of an SDK

log = logging.getLogger(__name__)


class RemoteStore(ABC, Generic[C]):
    """Implements a store with retries, on top of a few requests that a subclass defines.

    Args:
        uri: For messages; holds no secret.
        folder: Names are relative to it.
        patience: Seconds to keep trying while a server does not answer.
    """

    _client: C
    _pid: int
    _lock: threading.Lock

    def __init__(self, uri: str, folder: str, *, patience: float = PATIENCE) -> None:
        self.uri = uri.rstrip("/")
        self.patience = patience
        self._folder = folder.strip("/")
        self._silent = False  # the server does not answer, and that was logged
        self.__setstate__({})

    @property
    def address(self) -> str:
        return f"{self._server()} {self.uri}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _client=None, _pid=0, _lock=threading.Lock())

    @property
    def client(self) -> C:
        """This process's client: processes that share a connection mix up its responses."""
        if self._pid != os.getpid():
            if self._pid:  # another thread may have held the lock at the fork
                self._lock = threading.Lock()
            with self._lock:
                if self._pid != os.getpid():
                    self._client = self._connect()
                    self._pid = os.getpid()
        return self._client

    # Implemented by a subclass; `key` is the full name in the container.

    @abstractmethod
    def _connect(self) -> C: ...

    @abstractmethod
    def _server(self) -> str:
        """The server and account that the client connects to."""

    @abstractmethod
    def _size(self, key: str) -> int | None: ...

    @abstractmethod
    def _range(self, key: str, start: int, count: int) -> bytes: ...

    @abstractmethod
    def _put(
        self, path: Path, name: str, progress: Progress | None, replace: bool = False
    ) -> None: ...

    @abstractmethod
    def _delete(self, key: str) -> None:
        """Deletes a file, if it is there."""

    @abstractmethod
    def _list(self, start: str) -> Iterator[str]: ...

    @abstractmethod
    def _is_transient(self, error: Exception) -> bool | None:
        """Whether the same request may succeed later; None: the error is not the backend's."""

    # Overridden by a subclass to interpret errors.

    def _remedy(self, error: Exception) -> str:
        """The remedy for an error of credentials, container or bucket; "" for other errors."""
        return ""

    def _is_absent(self, error: Exception) -> bool:
        """Whether the container or bucket does not exist."""
        return False

    def size(self, name: str) -> int | None:
        return self.retried(name, lambda: self._size(self._key(name)))

    def read(self, name: str) -> bytes:
        size = self._present(name)
        return self.retried(name, lambda: self._complete_range(name, 0, size)) if size else b""

    def read_part(self, name: str, start: int, count: int) -> bytes:
        """`count` bytes of a file from `start` on, in one request."""
        return self.retried(name, lambda: self._complete_range(name, start, count))

    def download(self, name: str, to: Path, progress: Progress | None = None) -> None:
        size = self._present(name, progress)
        with reserved(to, size) as file:

            def fetch_part(start: int) -> None:
                count = min(PART, size - start)
                get = functools.partial(self._complete_range, name, start, count)
                write_at(file, self.retried(name, get, progress), start)
                if progress is not None:
                    progress(count)

            in_parallel(fetch_part, range(0, size, PART))
            os.fsync(file)

    def upload(self, path: Path, name: str, progress: Progress | None = None) -> None:
        if self.size(name) is not None:
            raise StoreError(f"{self.uri}/{name} exists already")
        self._put(path, name, progress)

    def replace(self, path: Path, name: str) -> None:
        self._put(path, name, None, replace=True)

    def remove(self, name: str) -> None:
        self.retried(name, lambda: self._delete(self._key(name)))

    def _send_parts(
        self,
        path: Path,
        name: str,
        length: int,
        send: Callable[[int, bytes], T],
        progress: Progress | None,
    ) -> list[T]:
        """Sends parts of `length` bytes by `send(number, data)`; returns the results in order."""
        results = dict[int, T]()
        with path.open("rb") as file:

            def send_part(start: int) -> None:
                data = os.pread(file.fileno(), length, start)
                number = start // length
                results[number] = self.retried(name, lambda: send(number, data), progress)
                if progress is not None:
                    progress(len(data))

            in_parallel(send_part, range(0, path.stat().st_size, length))
        return [results[number] for number in sorted(results)]

    def names(self, prefix: str = "") -> Iterator[str]:
        start = len(self._folder) + 1 if self._folder else 0
        listed = self.retried(prefix, lambda: list(self._list(self._key(prefix))))
        return iter(sorted(key[start:] for key in listed))

    def retried(self, name: str, action: Callable[[], T], progress: Progress | None = None) -> T:
        """The result of `action()`, repeated on transient errors for up to `patience` seconds.

        Args:
            name: Of the file, for the message.
            action: One request.
            progress: Called with 0 before each try; it may raise to give up.

        Raises:
            StoreError: The last try failed.
        """
        deadline = time.monotonic() + self.patience
        pause = 0.25
        while True:
            if progress is not None:
                progress(0)
            try:
                result = action()
                self._silent = False
                return result
            except Exception as error:  # each SDK has errors of its own
                transient = isinstance(error, Short) or self._is_transient(error)
                if transient is None:
                    raise
                # The SDKs' messages may contain the whole URL, with its signature.
                reason = hide_shapes(next(iter(str(error).splitlines()), type(error).__name__))
                if not transient or time.monotonic() + pause > deadline:
                    message = f"{self.uri}/{name}: {reason}"
                    remedy = self._remedy(error)
                    raise StoreError(message, transient=transient, remedy=remedy) from None
                if self.patience >= LONG and not self._silent:
                    self._silent = True
                    text = "%s does not answer, trying again for %g s: %s"
                    log.warning(text, self.uri, self.patience, reason)
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, 8)

    def _complete_range(self, name: str, start: int, count: int) -> bytes:
        data = self._range(self._key(name), start, count)
        if len(data) != count:
            raise Short(f"{len(data)} of {count} bytes arrived")
        return data

    def _present(self, name: str, progress: Progress | None = None) -> int:
        size = self.retried(name, lambda: self._size(self._key(name)), progress)
        if size is None:
            self.retried(name, self._find_container)
            raise Absent(f"{self.uri} has no {name}")
        return size

    def _find_container(self) -> None:
        """Raises the server's error if there is no container: a missing file looks the same."""
        try:
            next(self._list(self._folder), None)
        except Exception as error:  # the credentials may read but not list
            if self._is_absent(error):
                raise

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name


def in_parallel(action: Callable[[int], None], items: Sequence[int]) -> None:
    """Calls `action` with each item, on THREADS threads; after an error it stops, and raises it.

    It does not use concurrent.futures, whose threads delay the exit of a process.
    """
    waiting = iter(items)
    errors = list[BaseException]()

    def work() -> None:
        for item in waiting:  # shared by the threads
            if errors:
                return
            try:
                action(item)
            except BaseException as error:  # of this thread; the caller raises it
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in items[1:THREADS]]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
