"""The folder of a program's checkpoints, and its copy in a store where the folder does not last.

A copy is complete when its list is there: the files come first, each under the digest of its
content, and then the list with their names, sizes and digests. So an upload that is cut off leaves
the last complete copy as it was. Each node has a folder, and a copy, of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distdl.stores import Store, StoreError, open_store
from distdl.util.redact import redact

log = logging.getLogger(__name__)

READ = 1 << 22  # bytes
QUIET_S = 2.0  # a file that has changed since is not finished
PATIENCE_S = 30.0  # for the files to become quiet
LISTED = 8  # digits of a list's number
Files = dict[str, dict[str, Any]]


class NotKept(RuntimeError):
    """The checkpoints could not be copied to where they last, or not be restored."""


class SyncedFolder:
    """A local folder, and its copies below `nodes/N/` of a store.

    Args:
        path: The folder.
        place: The store's URI.
        node: The number of this node.
        seconds: Between two copies.
    """

    def __init__(self, path: Path, place: str, node: int, seconds: float) -> None:
        self.path = path
        self.seconds = seconds
        self._store: Store = open_store(place)
        self._prefix = f"nodes/{node}/"
        self._number = 0
        self._known: Files = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="checkpoints", daemon=True)

    def restore(self) -> int:
        """Fills the folder with the newest complete copy; returns how many files that has.

        Raises:
            NotKept: The store does not answer, or a file is not what was copied.
        """
        try:
            lists = sorted(self._lists())
            if not lists:
                return 0
            files = _files(json.loads(self._store.read(lists[-1])))
            for name, file in files.items():
                self._fetch(name, file)
        except (StoreError, OSError, ValueError) as error:
            what = f"the checkpoints in {redact(self._store.uri)} cannot be restored: {error}"
            raise NotKept(what) from None
        self._number = int(Path(lists[-1]).stem.rpartition("-")[2])
        self._known = files
        return len(files)

    def start(self) -> None:
        """Copies the folder every `seconds`, in a thread."""
        self._thread.start()

    def finish(self) -> None:
        """Copies the folder once more, when the program has ended.

        Raises:
            NotKept: It could not be copied.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self.copy(finished=True)
        except (StoreError, OSError) as error:
            what = f"the checkpoints are not in {redact(self._store.uri)}: {error}"
            raise NotKept(what) from None

    def copy(self, *, finished: bool = False) -> bool:
        """Copies what has changed; False if files were still being written, or nothing changed.
        `finished`: nobody writes any more."""
        before = self._seen()
        if not finished and not self._quiet(before):
            log.info("the checkpoints are still being written: they are copied later")
            return False
        files: Files = {}
        for name, (size, changed) in before.items():
            known = self._known.get(name)
            if known and known["size"] == size and known.get("changed") == changed:
                files[name] = known
            else:
                files[name] = {
                    "size": size,
                    "changed": changed,
                    "sha256": _digest(self.path / name),
                }
        if not finished and self._seen() != before:
            return False
        if _contents(files) == _contents(self._known):
            return False
        for name, file in files.items():
            target = f"{self._prefix}files/{file['sha256']}"
            if self._store.size(target) != file["size"]:
                self._store.upload(self.path / name, target)
        self._number += 1
        with tempfile.TemporaryDirectory() as folder:
            listed = Path(folder, "list.json")
            content = json.dumps({"files": files, "time": time.time()})
            listed.write_text(content, encoding="utf-8")
            name = f"{self._prefix}list-{self._number:0{LISTED}}.json"
            self._store.upload(listed, name)
        self._known = files
        return True

    def _repeat(self) -> None:
        while not self._stop.wait(self.seconds):
            try:
                deadline = time.monotonic() + PATIENCE_S
                while not self.copy() and time.monotonic() < deadline:
                    if self._quiet(self._seen()) or self._stop.wait(1.0):
                        break
            except (StoreError, OSError) as error:
                log.warning("the checkpoints could not be copied, and will be again: %s", error)

    def _seen(self) -> dict[str, tuple[int, int]]:
        """Size and time of each file, by its name."""
        seen = {}
        for path in sorted(self.path.rglob("*")):
            with suppress(FileNotFoundError):  # renamed meanwhile
                if path.is_file() and not path.is_symlink():
                    facts = path.stat()
                    name = path.relative_to(self.path).as_posix()
                    seen[name] = (facts.st_size, facts.st_mtime_ns)
        return seen

    def _quiet(self, seen: Mapping[str, tuple[int, int]]) -> bool:
        newest = max((changed for _, changed in seen.values()), default=0)
        return time.time_ns() - newest > QUIET_S * 1e9

    def _lists(self) -> list[str]:
        names = self._store.names(self._prefix)
        return [name for name in names if Path(name).name.startswith("list-")]

    def _fetch(self, name: str, file: Mapping[str, Any]) -> None:
        target = self.path / name
        if not target.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(f"{name!r} leads out of the folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() and _digest(target) == file["sha256"]:
            return
        part = target.with_name(f".{target.name}.part")
        part.unlink(missing_ok=True)
        self._store.download(f"{self._prefix}files/{file['sha256']}", part)
        if _digest(part) != file["sha256"]:
            raise ValueError(f"{name} is not what was copied")
        shutil.move(part, target)


def _files(content: object) -> Files:
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(f, dict) for f in files.values()):
        raise ValueError("its list is damaged")
    for file in files.values():
        file.pop("changed", None)
    return files


def _contents(files: Files) -> dict[str, str]:
    return {name: str(file["sha256"]) for name, file in files.items()}


def _digest(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(READ):
            sha256.update(data)
    return sha256.hexdigest()
