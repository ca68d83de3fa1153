"""The folder of a program's checkpoints, and its copy in a store where the folder does not last.

A copy is complete when its list is there: the files come first, each under the digest of its
content, and then the list with their names, sizes and digests. So an upload that is cut off leaves
the last complete copy as it was. Each node has a folder, and a copy, of its own.

What is copied is the folder at one moment: all its files are held by links, which a program that
replaces or removes them does not change. A file that is written to in the next two seconds was not
finished, and the copy keeps the version that it had before.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from distdl.ranks.stopping import StopRequest
from distdl.stores import Store, StoreError, open_store
from distdl.util.digests import sha256_of
from distdl.util.errors import NotRun
from distdl.util.redact import redact

log = logging.getLogger(__name__)

QUIET_S = 2.0  # a file that is written to for as long is not finished
TICK_S = 0.1
LISTED = 8  # digits of a list's number
Files = dict[str, dict[str, Any]]


class Version(NamedTuple):
    """What tells two versions of a file apart."""

    inode: int
    size: int
    changed: int  # nanoseconds

    @classmethod
    def of(cls, path: Path) -> Version:
        facts = path.stat()
        return cls(facts.st_ino, facts.st_size, facts.st_mtime_ns)


class NotKept(NotRun):
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
        """Makes the folder what the newest complete copy was; returns how many files that has. What
        a start that was cut off has left there besides may be half a checkpoint: it is removed.

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
            for name in self._seen().keys() - files.keys():
                (self.path / name).unlink()
        except (StoreError, OSError, ValueError) as error:
            what = f"the checkpoints in {redact(self._store.uri)} cannot be restored: {error}"
            raise NotKept(what) from None
        self._number = int(Path(lists[-1]).stem.rpartition("-")[2])
        self._known = files
        return len(files)

    def start(self) -> None:
        """Copies the folder every `seconds`, in a thread."""
        self._thread.start()

    def finish(self, stop: StopRequest, grace: float, *, wait: bool) -> None:
        """Copies the folder once more, when the programs of this node have ended, and removes it.

        Args:
            stop: Whether this rank is asked to end.
            grace: For so many seconds from then on the programs of the node's other ranks are
                awaited.
            wait: Whether they are awaited at all: those of a job that has failed end later.

        Raises:
            NotKept: It could not be copied.
        """
        asked: float | None = None
        while wait and not self._is_alone():
            if stop and asked is None:
                asked = time.monotonic()
            if asked is not None and time.monotonic() > asked + grace:
                log.warning("the checkpoints are copied while other ranks may still write them")
                break
            time.sleep(TICK_S)
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self.copy(finished=True)
        except (StoreError, OSError) as error:
            what = f"the checkpoints are not in {redact(self._store.uri)}: {error}"
            raise NotKept(what) from None
        if self._is_alone():
            shutil.rmtree(self.path, ignore_errors=True)

    def _is_alone(self) -> bool:
        """Whether no program of this node writes into the folder."""
        with _lock_of(self.path).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
        return True

    def copy(self, *, finished: bool = False) -> bool:
        """Copies what has changed; False if nothing has. `finished`: nobody writes any more."""
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=f"{self.path.name}-") as held:
            seen = self._hold(Path(held))
            newest = max((state.changed for _, state in seen.values()), default=0)
            if not finished and time.time_ns() - newest < QUIET_S * 1e9:
                self._stop.wait(QUIET_S)
            files: Files = {}
            unfinished = []
            for name, (link, state) in seen.items():
                known = self._known.get(name)
                if known and known.get("state") == state:
                    files[name] = known
                elif finished or Version.of(link) == state:
                    sha256 = sha256_of(link)
                    new = {"size": state.size, "sha256": sha256, "state": state}
                    if self._upload(link, new):
                        files[name] = new
                        continue
                if name not in files:
                    unfinished.append(name)
                    if known:
                        files[name] = known
        if unfinished:
            few = ", ".join(unfinished[:3])
            log.info("%d files are being written, and copied later: %s", len(unfinished), few)
        if _contents(files) == _contents(self._known):
            return False
        self._number += 1
        with tempfile.TemporaryDirectory() as folder:
            listed = Path(folder, "list.json")
            plain = {n: {"size": f["size"], "sha256": f["sha256"]} for n, f in files.items()}
            content = json.dumps({"files": plain, "time": time.time()})
            listed.write_text(content, encoding="utf-8")
            name = f"{self._prefix}list-{self._number:0{LISTED}}.json"
            self._store.upload(listed, name)
        self._known = files
        return True

    def _upload(self, path: Path, file: Mapping[str, Any]) -> bool:
        """Stores a version of a file under its digest; False if it was written to meanwhile."""
        target = f"{self._prefix}files/{file['sha256']}"
        if self._store.size(target) == file["size"]:
            return Version.of(path) == file["state"]
        self._store.upload(path, target)
        if Version.of(path) == file["state"]:
            return True
        self._store.remove(target)
        return False

    def _hold(self, folder: Path) -> dict[str, tuple[Path, Version]]:
        """A link to each file as it is now, and its state, by the file's name."""
        held = {}
        for number, name in enumerate(self._seen()):
            link = folder / str(number)
            with suppress(FileNotFoundError):  # removed meanwhile
                link.hardlink_to(self.path / name)
                held[name] = (link, Version.of(link))
        return held

    def _repeat(self) -> None:
        while not self._stop.wait(self.seconds):
            try:
                self.copy()
            except (StoreError, OSError) as error:
                log.warning("the checkpoints could not be copied, and will be again: %s", error)

    def _seen(self) -> dict[str, Version]:
        """The state of each file, by its name."""
        seen = {}
        for path in sorted(self.path.rglob("*")):
            with suppress(FileNotFoundError):  # renamed meanwhile
                if path.is_file() and not path.is_symlink():
                    seen[path.relative_to(self.path).as_posix()] = Version.of(path)
        return seen

    def _lists(self) -> list[str]:
        names = self._store.names(self._prefix)
        return [name for name in names if Path(name).name.startswith("list-")]

    def _fetch(self, name: str, file: Mapping[str, Any]) -> None:
        target = self.path / name
        if not target.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(f"{name!r} leads out of the folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() and sha256_of(target) == file["sha256"]:
            return
        part = target.with_name(f".{target.name}.part")
        part.unlink(missing_ok=True)
        self._store.download(f"{self._prefix}files/{file['sha256']}", part)
        if sha256_of(part) != file["sha256"]:
            raise ValueError(f"{name} is not what was copied")
        shutil.move(part, target)


@contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Around a program that may write into the folder, also if its rank is killed."""
    with _lock_of(folder).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.ranks")


def _files(content: object) -> Files:
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(f, dict) for f in files.values()):
        raise ValueError("its list is damaged")
    return files


def _contents(files: Files) -> dict[str, str]:
    return {name: str(file["sha256"]) for name, file in files.items()}
