"""Uploads a prepared data set to a store: skips files that are there, sends the manifest last."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from distdl.datasets.cache import difference
from distdl.datasets.format import MANIFEST, File, Manifest
from distdl.stores import Store, StoreError, is_remote, open_store
from distdl.tools.prepare.source import Progress
from distdl.util.errors import Problem, Unfinished, UserError
from distdl.util.wording import first_few

# Files sent at once. Each is sent in parallel parts, so more files would not be faster.
PARALLEL = 4
PATIENCE = 10.0  # seconds, for the check before the work: a user is waiting for it


def upload(out: Path, url: str, progress: Progress) -> None:
    """Uploads a prepared data set to a store, or the rest of it after an interruption.

    Each file's sha256 is compared with the manifest before it is sent, so that damage on this disk
    is not published. The server checks what arrives (`distdl.stores.Store`), and at the end all
    sizes are compared. The indexes are sent first: they identify the data set of an unfinished
    upload. The manifest is sent last: without it there is no data set at `url`. `progress` is
    called with the bytes that are in the store, and the total.

    Raises:
        UserError: `out` is damaged or not a prepared data set, `url` holds other files, or the
            store cannot be reached. Nothing at `url` is ever replaced.
    """
    manifest = read_manifest(out)
    files = _files(manifest)
    try:
        store = open_store(url)
        missing = _missing(store, out, files)
        sending = _Sending(store, out, files, missing, progress)
        indexes, shards = files[: len(manifest.splits)], files[len(manifest.splits) :]
        for file in (file for file in indexes if file in missing):
            sending.send(file)
        sending.send_all([file for file in shards if file in missing])
        for file in files:
            size = store.size(file.name)
            if size != file.bytes:
                raise Unfinished.at(
                    "--upload",
                    what=f"{file.name} has {size} bytes at {store.uri}, and {file.bytes} here",
                    remedy="remove it there and upload again",
                    code="mismatch",
                )
        if store.size(MANIFEST) is None:
            store.upload(out / MANIFEST, MANIFEST)
    except StoreError as error:
        raise Unfinished(_failed(error, "the same command resumes where it stopped")) from error


def check_target(url: str, out: Path | None) -> None:
    """Checks that a data set can be uploaded to `url`, before hours of preparation.

    `out` None: it is not prepared yet, so `url` must be empty. Raises UserError if it cannot be
    reached, does not exist, or holds something else.
    """
    try:
        store = open_store(url, patience=PATIENCE)
        if not is_remote(url) and Path(store.uri).is_file():
            raise UserError.at(
                "--upload", what=f"{store.uri} is a file, not a folder", code="wrong-kind"
            )
        if out is None:
            _refuse(store, list(store.names()))
        else:
            _missing(store, out, _files(read_manifest(out)))
    except StoreError as error:
        raise UserError(_failed(error, "check the address and the network")) from error


def _files(manifest: Manifest) -> list[File]:
    """All files of a data set, the indexes first."""
    splits = manifest.splits.values()
    return [*(split.index for split in splits), *(s for split in splits for s in split.shards)]


def _refuse(store: Store, others: list[str]) -> None:
    """Refuses `others`: files that do not belong to this upload."""
    if others:
        what = f"{store.uri} holds something else: {first_few(others)}"
        if MANIFEST in others:
            what = f"{store.uri} holds a prepared data set already"
        raise UserError.at(
            "--upload", what=what, remedy="choose an empty folder", code="exists-already"
        )


def _failed(error: StoreError, again: str) -> Problem:
    """A store's error as a Problem, with the remedy `again` if the error is transient."""
    return Problem(
        "--upload", what=str(error), remedy=error.remedy or again * error.transient, code=error.code
    )


def read_manifest(out: Path) -> Manifest:
    """The manifest in a folder; raises UserError if there is none."""
    path = out / MANIFEST
    if not path.is_file():
        raise UserError.at(
            "--upload",
            what=f"{out} is not a prepared data set: it has no {MANIFEST}",
            remedy="prepare it first",
            code="wrong-kind",
        )
    return Manifest.from_json(path.read_bytes(), str(path))


def _missing(store: Store, out: Path, files: list[File]) -> set[File]:
    """The files that are not in the store yet; UserError if it holds something else."""
    known = {file.name: file for file in files}
    stored = list(store.names())
    _refuse(store, sorted(set(stored) - known.keys() - {MANIFEST}))
    if MANIFEST in stored and store.read(MANIFEST) != (out / MANIFEST).read_bytes():
        raise UserError.at(
            "--upload",
            what=f"{store.uri} holds another prepared data set",
            remedy="choose an empty folder",
            code="exists-already",
        )
    for name in filter(known.get, stored):
        # An index holds the sha256 of each sample: if the indexes are equal, so are the shards.
        same = store.size(name) == known[name].bytes
        if same and name.endswith(".npy"):
            same = hashlib.sha256(store.read(name)).hexdigest() == known[name].sha256
        if not same:
            raise UserError.at(
                "--upload",
                what=f"{store.uri} holds another {name}, perhaps from an unfinished upload",
                remedy="choose an empty folder, or empty this one",
                code="exists-already",
            )
    return {file for name, file in known.items() if name not in stored}


class UploadStopped(Exception):
    """Another file has failed, or the user has pressed Ctrl-C."""


class _Sending:
    """A running upload; `progress` is called by one thread at a time."""

    def __init__(
        self, store: Store, out: Path, files: list[File], missing: set[File], progress: Progress
    ) -> None:
        self.store = store
        self.out = out
        self.progress = progress
        self.total = sum(file.bytes for file in files)
        self.done = self.total - sum(file.bytes for file in missing)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        progress(self.done, self.total)

    def send(self, file: File) -> None:
        path = self.out / file.name
        if not path.exists() or difference(path, file):
            raise Unfinished.at(
                "--upload",
                what=f"{path} is {'damaged' if path.exists() else 'missing'}",
                remedy="prepare the data set again, elsewhere",
                code="damaged-file",
            )
        if not self._stop.is_set():
            self.store.upload(path, file.name, self._passed)

    def send_all(self, files: list[File]) -> None:
        """Sends files in parallel; the first error stops the rest, and is raised."""
        with ThreadPoolExecutor(PARALLEL) as pool:
            try:
                sent = [pool.submit(self.send, file) for file in files]
                for future in wait(sent, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:  # also on Ctrl-C: stop running uploads, start no more
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _passed(self, count: int) -> None:
        if self._stop.is_set():
            raise UploadStopped
        with self._lock:
            self.done += count
            self.progress(self.done, self.total)
