"""Copies a run's files between a pod's disk and a store on Blob or S3.

Every file of a run has one writer, or the same bytes on all nodes, so that no pod undoes what
another one has stored. The manifest of a checkpoint is copied last.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from distdl.launchers.common import manifests_last
from distdl.stores import Store, open_store
from distdl.util.errors import StoreError
from distdl.util.safe_paths import local_paths

Stamp = tuple[int, int]  # size, and time of the last change in ns
BUNDLES = "bundles/"  # of the user's code, which is no part of the run


class Mirror:
    """The folder of a run on this disk, and the same in the store.

    Args:
        uri: The store of the run.
        folder: Its folder here.
    """

    def __init__(self, uri: str, folder: Path) -> None:
        self.store: Store = open_store(uri)
        self.folder = folder
        self.known: dict[str, Stamp] = {}  # what store and disk have in common
        self._lock = threading.Lock()
        self._over = threading.Event()

    def restore(self, stopped: Callable[[], bool]) -> None:
        """Copies everything here that is not here yet. Ends early if `stopped` says so.

        Raises:
            StoreError: The store does not answer, or refuses.
        """
        names = [name for name in self.store.names() if not name.startswith(BUNDLES)]
        for name, path in local_paths(self.folder, manifests_last(names)).items():
            if stopped():
                return
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.part")
            self.store.download(name, temporary)
            temporary.replace(path)
            self.known[name] = stamp(path)

    def send(self, only: Iterable[str] = ()) -> None:
        """Stores what has changed, and removes from the store what this pod had and has removed.

        Raises:
            StoreError: As above. What was stored until then stays.
        """
        with self._lock:
            found = self._found()
            chosen = set(only) or found.keys()
            for name in manifests_last(chosen & found.keys()):
                if self.known.get(name) != found[name]:
                    path = self.folder / name
                    try:
                        before = stamp(path)
                        self.store.replace(path, name)
                        after = stamp(path)
                    except FileNotFoundError:  # removed meanwhile
                        continue
                    if before == after:  # else it has grown, and the next time has the rest
                        self.known[name] = before
            for name in () if only else self.known.keys() - found.keys():
                # Somebody else may have stored another file of this name since.
                if self.store.size(name) == self.known[name][0]:
                    self.store.remove(name)
                del self.known[name]

    def start(self, seconds: float) -> None:
        """Sends in a thread, every `seconds` seconds, until `end`."""

        def run() -> None:
            while not self._over.wait(seconds):
                try:
                    self.send()
                except (StoreError, OSError) as error:
                    say(f"the store is behind, trying again: {error}")

        threading.Thread(target=run, daemon=True, name="mirror").start()

    def end(self) -> None:
        """Sends for the last time. Raises as `send`."""
        self._over.set()
        self.send()

    def _found(self) -> dict[str, Stamp]:
        """The complete files of the run on this disk."""
        found: dict[str, Stamp] = {}
        for top, folders, files in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                path = Path(top, name)
                if name.startswith(".") or path.is_symlink():
                    continue
                try:
                    found[path.relative_to(self.folder).as_posix()] = stamp(path)
                except FileNotFoundError:
                    continue
        return found


def stamp(path: Path) -> Stamp:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


def say(text: str) -> None:
    print(f"distdl: {text}", file=sys.stderr, flush=True)
