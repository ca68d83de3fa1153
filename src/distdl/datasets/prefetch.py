"""Fetches shards before they are needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from distdl.datasets.cache import Cache, NoRoom
from distdl.datasets.format import File
from distdl.util.errors import UserError

log = logging.getLogger(__name__)

THREADS = 2  # while one shard's hash is taken, the next one comes
PAUSE = 0.2  # seconds until a cache that is full is looked at again


class Prefetch:
    """Fetches shards in the background, those first that are needed first.

    One per node, in a process of its first rank. A loader's worker that needs a shard sooner
    fetches it itself, and reports errors: here they are only logged.

    Args:
        cache: With a store of its own: its client belongs to these threads.
        evictable: As `Cache.fetch` has it, for a shard that is not needed yet; None: the cache
            holds all, and nothing is removed from it.
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
        """From now on fetches these, the first one first; skips those that are in the cache.

        Args:
            wanted: Asked again before each file.
        """
        with self._change:
            self._wanted = wanted
            self._change.notify_all()
            for number in range(THREADS - len(self._threads)):
                thread = threading.Thread(target=self._work, name=f"shards-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """Ends the threads; a download that is under way is given up."""
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
                    # In a cache that cannot hold all, time alone makes another shard the next one.
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
        """False: there is no room for it yet."""
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
    """Ends a download."""
