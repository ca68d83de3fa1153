"""The schema of MLflow's database: whether the MLflow that is installed here can use it.

A database file is looked at in a moment. MLflow, whose import takes seconds, is not imported: the
files of its migrations say which schemas it knows.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import shlex
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from distdl.tracking.outbox import database_path, is_local, redact

NEWER = (
    "was written by a newer MLflow than the one that is installed here",
    "pip install --upgrade mlflow, or choose another database: MLFLOW_TRACKING_URI=sqlite:///FILE",
)
OLDER = "was written by an older MLflow than the one that is installed here"
MIXED = "has tables or columns of another version of MLflow than the one that uses it"
# Of SQLite, PostgreSQL and MySQL, and of Alembic, which makes MLflow's migrations.
MISFIT = re.compile(
    r"\((sqlite3|psycopg2?|pymysql|MySQLdb|pyodbc)\.[\w.]+\) [^\n]*?"
    r"(?P<what>(no such (table|column)|has no column named|duplicate column|Unknown column"
    r"|doesn't exist|(table|column|relation) \S+ (already exists|does not exist))"
    r"[^\n]{0,60})|more than one head present"
)
RESTORE = "restore it from a copy, or choose another database: MLFLOW_TRACKING_URI=sqlite:///FILE"
FOUND = re.compile(r"database schema \(found version (\w+), but expected")


@dataclass(frozen=True)
class Migration:
    """One step between two schemas: the one before it, and the tables that it creates, or None if
    its file does not name them."""

    before: str | None
    tables: frozenset[str] | None


@functools.cache
def migrations() -> dict[str, Migration]:
    """The migrations of the installed MLflow, by the schema that each leads to."""
    spec = importlib.util.find_spec("mlflow")
    known: dict[str, Migration] = {}
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in Path(folder, "store/db_migrations/versions").glob("*.py"):
            text = path.read_text(encoding="utf-8")
            name = re.search(r"^revision = ['\"](\w+)", text, re.MULTILINE)
            before = re.search(r"^down_revision = ['\"](\w+)", text, re.MULTILINE)
            if name:
                known[name[1]] = Migration(before[1] if before else None, created(text))
    return known


def created(migration: str) -> frozenset[str] | None:
    """The tables that the text of a migration creates; None if it names one by another name."""
    calls = len(re.findall(r"\bcreate_table\(", migration))
    names = re.findall(r"\bcreate_table\(\s*['\"](\w+)['\"]", migration)
    return frozenset(names) if len(names) == calls else None


def misfit(uri: str) -> tuple[str, str] | None:
    """What is wrong with the schema of a database file, and what helps; None if MLflow uses or
    upgrades it, if that cannot be told, or if it is no such file."""
    path = database_path(uri) if is_local(uri) else None
    if path is None or not path.is_file():
        return None
    with contextlib.suppress(sqlite3.Error):
        address = f"{path.as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=1)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            if {"runs", "alembic_version"} <= tables:
                rows = database.execute("SELECT version_num FROM alembic_version").fetchall()
                return judged([str(version) for (version,) in rows], tables, uri)
    return None


def judged(versions: list[str], tables: set[str], uri: str) -> tuple[str, str] | None:
    known = migrations()
    if not known:
        return None
    if {*versions} - known.keys():
        return NEWER
    if len(versions) > 1:
        return MIXED, RESTORE
    # MLflow upgrades a database that lacks a table, and refuses one that lacks anything else.
    lacking = later_than(versions[0]) if versions else []
    stays = all(each.tables is not None and each.tables <= tables for each in lacking)
    return (OLDER, upgrade(uri)) if lacking and stays else None


def later_than(version: str) -> list[Migration]:
    """The migrations from a schema to the newest."""
    known = migrations()
    after = {each.before: name for name, each in known.items()}
    later: list[Migration] = []
    while following := after.get(version):
        later.append(known[following])
        version = following
    return later


def told_by(text: str, uri: str) -> tuple[str, str] | None:
    """The same, from an error's words."""
    if (found := FOUND.search(text)) and found[1] not in ("None", *migrations()):
        return NEWER
    if found:
        return OLDER, upgrade(uri)
    if "Can't locate revision" in text:
        return NEWER
    if found := MISFIT.search(text):
        remedy = f"ask who runs it to look at its database: {RESTORE}"
        return f"{MIXED} ({found['what'] or found[0]})", remedy if uri.startswith(
            "http"
        ) else RESTORE
    return None


def upgrade(uri: str) -> str:
    """The command that upgrades a database."""
    address = '"$MLFLOW_TRACKING_URI"' if "***" in redact(uri) else shlex.quote(uri)
    return f"mlflow db upgrade {address}, after a backup"
