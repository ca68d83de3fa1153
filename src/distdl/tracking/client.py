"""MLflow's client: its import, the names and values that it accepts, and locks."""

from __future__ import annotations

import contextlib
import functools
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
from typing import TYPE_CHECKING

from distdl.tracking.outbox import database_path, is_local
from distdl.tracking.refusals import status_of
from distdl.util.names import kept_apart

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

LONGEST_NAME = 250  # MLflow's own limit
CREATION = 5.0  # seconds since the last write, in which a database may still be being created
# Errors that the same data cause every time: sending them again would block everything after them.
PERMANENT = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}

# Modules that MLflow would import while it sends. Imported early, they delay no step.
LAZY = (
    "mlflow.store.tracking.sqlalchemy_store mlflow.store.tracking.sqlalchemy_workspace_store "
    "sqlalchemy.dialects.sqlite alembic.command alembic.config filelock"
)

# A data loader must not fork while another thread is importing mlflow: the child would wait for
# ever for the import lock of pandas or numpy. So a fork waits for the import, but at most 30 s: the
# import may in turn wait for a module that the forking thread is importing.
_importing = threading.RLock()
_acquired: list[bool] = []


def _after_fork() -> None:
    if _acquired.pop():
        _importing.release()


os.register_at_fork(
    before=lambda: _acquired.append(_importing.acquire(timeout=30)),
    after_in_parent=_after_fork,
    after_in_child=_after_fork,
)


def import_client() -> type[MlflowClient]:
    """Imports MLflow's client class. The first import takes seconds."""
    with _importing:
        for name in ("alembic", "mlflow.store.db.utils"):  # they log the creation of a database
            logging.getLogger(name).setLevel(logging.WARNING)
        for name in LAZY.split():
            importlib.import_module(name)
        from mlflow.tracking import MlflowClient
    return MlflowClient


def prepare_environment() -> None:
    """Sets MLflow's settings that exist only as variables, unless the user has set them. Call this
    in the main thread, before mlflow is imported."""
    # We retry ourselves: MLflow's 7 retries would hide for minutes that the server is back.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # MLflow would print the address with its password, and into a progress bar.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


@functools.lru_cache(maxsize=10_000)
def metric_name(name: str) -> str:
    """The name itself if MLflow accepts it for a metric, parameter or tag. Of `acc@1`, `a//b`, `/x`
    and long names it makes a similar name that no other name becomes."""
    plain = posixpath.normpath(re.sub(r"[^\w\-. :/]", "_", name))
    plain = re.sub(r"^(\.\./)+", "", plain).strip("/")
    if plain == "." or plain.startswith(".."):
        plain = plain.lstrip(".")
    return kept_apart(name, plain or "_", LONGEST_NAME)


def is_permanent(error: Exception) -> bool:
    """Whether sending the same data again can never succeed."""
    if status_of(error) in ("400", "413", "414", "422"):
        return True
    if isinstance(error, FileExistsError | NotADirectoryError):
        return True
    return getattr(error, "error_code", None) in PERMANENT


def last_written(address: str) -> float | None:
    """When a local database was last written; None for a server, or if there is no database."""
    with contextlib.suppress(OSError):
        return database_path(address).stat().st_mtime if is_local(address) else None
    return None


def set_aside(address: str, written: float) -> bool:
    """Renames a database whose creation was interrupted, since MLflow would always refuse it.
    Returns False for any other database. Call this under the lock that guards the creation, with
    the value of `last_written` before MLflow tried to open the database."""
    database = database_path(address)
    if time.time() - written < CREATION:  # perhaps by `mlflow ui`, which takes no lock
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as file:
            tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master")}
            for table in tables & {"runs", "_alembic_tmp_runs"}:  # the second during an upgrade
                if file.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
                    return False
    except (OSError, sqlite3.Error):
        return False
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # SqlAlchemyStore would keep using the file that it has open.
    getattr(SqlAlchemyStore, "_engine_map", {}).pop(address, None)
    kept = database.with_name(f"{database.name}.incomplete-{time.time():.0f}")
    for tail in ("", "-journal", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{database}{tail}", f"{kept}{tail}")
    text = "%s is incomplete (a run was killed while creating it) and holds no run: it is renamed "
    log.warning(text + "to %s, and a new one is created", database, kept.name)
    return True


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Holds a lock on a file. Yields False if another process holds the lock."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    free = True
    try:
        lock.acquire()
    except Timeout:
        free = False
    except (OSError, NotImplementedError):  # this mount has no locks (blobfuse): proceed without
        pass
    try:
        yield free
    finally:
        lock.release()
