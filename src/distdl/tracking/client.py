"""MLflow's client and its habits, apart from what we send: import, names, refusals, locks."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import posixpath
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distdl.tracking.outbox import database_path, is_local

log = logging.getLogger(__name__)

BEING_MADE = 5.0  # seconds since it was written in which a database may still be in the making
# Of an answer that will never change: trying again would hold up everything behind it.
REFUSED = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}

# Imported while it sends, unless it is there: a step would wait for it.
LAZY = (
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "sqlalchemy.dialects.sqlite",
    "alembic.command",
    "alembic.config",
    "filelock",
)

# A data loader must not fork while another thread is in the middle of importing mlflow: the child
# would wait for ever on the import lock of pandas or numpy. So a fork waits (once, seconds; never
# for ever, should that import itself wait for a module which the forking thread is importing).
_importing = threading.RLock()
_held: list[bool] = []


def _after_fork() -> None:
    if _held.pop():
        _importing.release()


os.register_at_fork(
    before=lambda: _held.append(_importing.acquire(timeout=30)),
    after_in_parent=_after_fork,
    after_in_child=_after_fork,
)


def import_client() -> Any:
    """MLflow's client class, imported when first needed: it takes seconds."""
    with _importing:
        for name in ("alembic", "mlflow.store.db.utils"):  # the making of a database, line by line
            logging.getLogger(name).setLevel(logging.WARNING)
        for name in LAZY:
            importlib.import_module(name)
        from mlflow.tracking import MlflowClient
    return MlflowClient


def prepare_environment() -> None:
    """MLflow's settings that exist as variables only. What the user set stays.

    Call it in the main thread, before mlflow is imported. We retry ourselves, and MLflow's default
    of 7 retries of up to 120 s each would hide for minutes that the server is back.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # It would print the address, password included, from the thread into a progress bar.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


def metric_name(name: str) -> str:
    """The nearest name that MLflow accepts (it refuses `acc@1`, `a//b`, `/x` and what is long).

    For parameters and tags as well.
    """
    name = re.sub(r"[^\w\-. :/]", "_", name)
    return posixpath.normpath(name).replace("../", "").strip("/")[:250] or "_"


def refusal(error: Exception) -> bool:
    """Whether sending the same again can never succeed."""
    answer = getattr(getattr(error, "response", None), "status_code", None)  # to an artifact
    if answer in (400, 413, 414, 422) or isinstance(error, FileExistsError | NotADirectoryError):
        return True
    return getattr(error, "error_code", None) in REFUSED


def last_written(address: str) -> float | None:
    """When a local database was last written; None for one that is not there, or for a server."""
    try:
        return database_path(address).stat().st_mtime if is_local(address) else None
    except OSError:
        return None


def put_aside(address: str, written: float) -> bool:
    """Renames a database whose making was cut short, which MLflow refuses for ever. True if it was
    one: it holds no run. Call it under the lock of those that make it.

    Args:
        written: `last_written`, before MLflow tried to open it.
    """
    database = database_path(address)
    if time.time() - written < BEING_MADE:  # `mlflow ui` asks for no lock
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as file:
            tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master")}
            for table in tables & {"runs", "_alembic_tmp_runs"}:  # the other while it is upgraded
                if file.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
                    return False
    except (OSError, sqlite3.Error):
        return False
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # It would keep using the file that it has open.
    getattr(SqlAlchemyStore, "_engine_map", {}).pop(address, None)
    kept = database.with_name(f"{database.name}.half-made-{time.time():.0f}")
    for tail in ("", "-journal", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{database}{tail}", f"{kept}{tail}")
    log.warning(
        "%s was half made (a run was killed in that moment) and holds no run: it is kept "
        "as %s, and made anew",
        database,
        kept.name,
    )
    return True


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Hold a lock file; yields False where another process holds it."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except (OSError, NotImplementedError):  # a mount without locks (blobfuse): better without
        yield True
        return
    try:
        yield True
    finally:
        lock.release()
