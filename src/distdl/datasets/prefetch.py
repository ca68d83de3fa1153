"""Fetches shards before they are needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from distdl.datasets.cache import Cache, NoRoom
from distdl.datasets.format import File
from distdl.util.errors import UserError

log = logging.getLogger(__name__)

THREADS = 2  # while one shard is hashed, the next one is downloaded
PAUSE = 0.2  # seconds between tries while the cache is full


class Prefetch:
    """Fetches shards in the background, in the order in which they are needed.

    There is one per node, in the process of local rank 0. A loader's worker that needs a shard
    sooner fetches it itself. Errors are only logged here: the worker that needs the shard raises.

    Args:
        cache: With a separate store, whose client only these threads use.
        evictable: As for `Cache.fetch`, for a shard that is not needed yet; None: the cache
            holds all shards, and nothing is evicted.
    """

    def __init__(
        self, cache: Cache, evictable: Callable[[File], Sequence[str]] | None = None
    ) -> None:
        self._cache, self._evictable = cache, evictable
        self._wanted: Callable[[], Sequence[File]] = list
        self._busy: set[str] = set()
        self._failed: set[str] = set()
        self._change = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def want(self, wanted: Callable[[], Sequence[File]]) -> None:
        """Sets the files to fetch from now on, in their order; cached ones are skipped.

        Args:
            wanted: Returns the files; called again before each download.
        """
        with self._change:
            self._wanted = wanted
            self._change.notify_all()
            for number in range(THREADS - len(self._threads)):
                thread = threading.Thread(target=self._work, name=f"shards-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """Ends the threads, and aborts running downloads."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join(timeout=30)

    def _work(self) -> None:
        while True:
            with self._change:
                file = self._next()
                while file is None and not self._closed:
                    # If the cache cannot hold all, the next shard changes as training advances.
                    self._change.wait(PAUSE if self._evictable else None)
                    file = self._next()
                if self._closed or file is None:
                    return
                self._busy.add(file.name)
            fetched = self._fetch(file)
            with self._change:
                self._busy.remove(file.name)
                if not fetched and not self._closed:
                    self._change.wait(PAUSE)

    def _next(self) -> File | None:
        for file in self._wanted():
            known = file.name in self._busy or file.name in self._failed
            if not known and not self._cache.has(file):
                return file
        return None

    def _fetch(self, file: File) -> bool:
        """Tries to fetch a file; False: there is no room for it yet."""
        evictable = self._evictable
        try:
            names = None if evictable is None else lambda: evictable(file)
            self._cache.fetch(file, names, self._end_if_closed)
        except _Closed:
            return True
        except NoRoom:
            if evictable is not None:
                return False
            self._give_up(file, "no room")
        except (UserError, OSError) as error:
            self._give_up(file, error)
        return True

    def _give_up(self, file: File, reason: object) -> None:
        self._failed.add(file.name)
        log.warning("%s comes when it is needed: %s", file.name, reason)

    def _end_if_closed(self, count: int) -> None:
        if self._closed:
            raise _Closed


class _Closed(Exception):
    """Aborts a download."""
