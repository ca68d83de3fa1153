"""Fetches shards before they are needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from distdl.datasets.cache import Cache, Evictable
from distdl.datasets.format import File
from distdl.datasets.read_ahead import PageCache
from distdl.util.errors import NoRoom, UserError

log = logging.getLogger(__name__)

THREADS = 2  # while one shard is hashed, the next one is downloaded
PAUSE = 0.2  # seconds between tries while the cache is full


class Prefetch:
    """Fetches shards in the background, in the order in which they are needed.

    There is one per node, in the process of local rank 0. A loader's worker that needs a shard
    sooner fetches it itself. Errors are only logged here: the worker that needs the shard raises.

    Args:
        cache: Its store must be a separate one, whose client only these threads use.
        evictable: As for `Cache.fetch`, for a shard that is not needed yet; None: the cache
            holds all shards, and nothing is evicted.
    """

    def __init__(self, cache: Cache | PageCache, evictable: Evictable | None = None) -> None:
        self._cache = cache
        self._evictable = evictable
        self._wanted: Callable[[], Sequence[File]] = list
        self._busy = set[str]()
        self._failed = set[str]()
        self._change = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def want(self, wanted: Callable[[], Sequence[File]]) -> None:
        """Sets the function that returns the files to fetch, in order, before each download."""
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
        skipped = self._busy | self._failed
        wanted = (file for file in self._wanted() if file.name not in skipped)
        return next((file for file in wanted if not self._cache.has(file)), None)

    def _fetch(self, file: File) -> bool:
        """Tries to fetch a file; False: there is no room for it yet."""
        try:
            self._cache.fetch(file, self._evictable, self._end_if_closed)
        except _Closed:
            pass
        except (UserError, OSError) as error:
            full = isinstance(error, NoRoom)
            if full and self._evictable is not None:
                return False
            self._failed.add(file.name)
            reason = "no room" if full else error
            log.warning("%s was not prefetched, and will be fetched late: %s", file.name, reason)
        return True

    def _end_if_closed(self, count: int) -> None:
        if self._closed:
            raise _Closed


class _Closed(Exception):
    """Aborts a download."""
