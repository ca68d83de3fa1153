"""Where a study is kept: in Optuna's journal in its folder, or at an address that Optuna knows."""

from __future__ import annotations

import os
import re
import uuid
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, quote_plus

from distdl.runs.directory import shown
from distdl.runs.files import write_text
from distdl.util.errors import UserError
from distdl.util.extras import install, missing_module
from distdl.util.redact import redact
from distdl.util.secret_names import looks_secret
from distdl.util.secret_shapes import STARS

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage

FLAG = "--storage"
JOURNAL = "study.journal"
KEY_FILE = ".tune.key"  # in the folder that holds the trials of a study
KEY = "distdl.key"  # of the study, with the same text
LOCK_S = 5  # after which a lock is taken for one of a process that was killed
FILE = "sqlite:///study.db"
# Drivers whose packages have other names.
DRIVERS = {"psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}
REFERENCE = re.compile(r"\$\{oc\.env:(\w+)\}")
Direction = Literal["maximize", "minimize"]


@dataclass(frozen=True)
class Address:
    """A storage that Optuna reaches by a URL.

    Args:
        typed: As on the command line; it may name environment variables: `${oc.env:STUDY_URL}`.
        url: With the values of these variables.
        shown: What may be printed and kept: without a password.
        secrets: What is hidden in messages of others.
    """

    typed: str
    url: str
    shown: str
    secrets: Sequence[str] = ()

    @classmethod
    def of(cls, typed: str) -> Address:
        """
        Raises:
            UserError: The text is no address, names a variable that is not set, or keeps nothing.
        """
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        def value(match: re.Match[str]) -> str:
            if match[1] not in os.environ:
                raise UserError.at(
                    FLAG,
                    what=f"the environment variable {match[1]} is not set",
                    remedy=f"export {match[1]}={FILE}",
                    code="missing-key",
                )
            return os.environ[match[1]]

        url = REFERENCE.sub(value, typed)
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError):
            raise UserError.at(
                FLAG,
                what="is no address of a database, which begins with its kind and ://",
                remedy=f"{FLAG} {FILE}",
                code="wrong-kind",
            ) from None
        if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
            raise UserError.at(
                FLAG,
                what="a database in memory is lost with this command, and no search could go on",
                remedy=f"{FLAG} {FILE}",
                code="wrong-kind",
            )
        values = [str(parsed.password or "")]
        values += [str(value) for name, value in parsed.query.items() if looks_secret(name)]
        secrets = {way(value) for value in values if value for way in (str, quote, quote_plus)}
        typed_it = any(secret in typed for secret in secrets)
        public = redact(parsed.render_as_string(hide_password=True)) if typed_it else typed
        return cls(typed, url, public, sorted(secrets, key=len, reverse=True))

    def hidden(self, text: str) -> str:
        """A text of others in which the address or the password may stand."""
        for address in (self.url, self.typed):
            text = text.replace(address, self.shown)
        for secret in self.secrets:
            text = text.replace(secret, STARS)
        return text


def opened(
    address: Address | None, folder: Path, name: str, directions: Sequence[Direction]
) -> Study:
    """A study, new or as it was left, whose trials lie in `folder`.

    Raises:
        UserError: The storage cannot be used, or another folder has the trials of this study.
    """
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if address is None:
            return _of_journal(folder / JOURNAL, name, directions)
        try:
            return _study(optuna.storages.get_storage(address.url), name, directions)
        except Exception as error:  # a database's driver has its own errors, and may be missing
            if module := missing_module(error):
                raise UserError.at(
                    FLAG,
                    what=f"needs the package {module}",
                    remedy=install(DRIVERS.get(module, module)),
                    code="not-installed",
                ) from None
            first = address.hidden(str(error)).partition("\n")[0]
            raise UserError.at(
                FLAG,
                what=f"{address.shown} cannot be used: {type(error).__name__}: {first}",
                remedy=f"{FLAG} {FILE}, or without it a file in the study's folder",
                code="unreachable",
            ) from None


def _of_journal(path: Path, name: str, directions: Sequence[Direction]) -> Study:
    try:
        return _study(_journal(path), name, directions)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError.at(
            shown(path),
            what=f"is no whole journal of Optuna: {type(error).__name__}: {error}",
            remedy="choose another name=STUDY",
            code="damaged-file",
        ) from error


def _study(storage: BaseStorage, name: str, directions: Sequence[Direction]) -> Study:
    import optuna

    try:
        return optuna.create_study(storage=storage, study_name=name, directions=directions)
    except optuna.exceptions.DuplicatedStudyError:
        return optuna.load_study(storage=storage, study_name=name)


def claimed(study: Study, folder: Path, address: Address | None) -> str:
    """The key of a study, by which its folder, and trackers, know it. The trials of a study lie in
    one folder: a search from another one would start those again that are under way there.

    Raises:
        UserError: The study belongs to another folder.
    """
    file = folder / KEY_FILE
    mine = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    theirs = study.user_attrs.get(KEY)
    if theirs is not None and address is None:
        mine = str(theirs)  # the journal lies in the folder
    elif theirs is not None and theirs != mine:
        raise not_ours(study, address)
    key = mine or uuid.uuid4().hex
    write_text(file, f"{key}\n")
    if theirs is None:
        study.set_user_attr(KEY, key)
    return key


def not_ours(study: Study, address: Address | None) -> UserError:
    place = address.shown if address else "this file"
    return UserError.at(
        "name",
        what=f"the study {study.study_name} of {place} has its trials in another folder",
        remedy="search in that folder, or choose another name=STUDY",
        code="mismatch",
    )


def errors() -> tuple[type[Exception], ...]:
    """What a storage raises that may answer again later."""
    from optuna.exceptions import StorageInternalError

    return (OSError, StorageInternalError)


def _journal(path: Path) -> BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    class WholeLines(JournalFileBackend):
        """Removes what a write left behind that was cut short, by a kill or a full disk: Optuna
        would take it for the beginning of the next line, and could not read the file again."""

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            _end_with_a_line(path)
            try:
                super().append_logs(logs)
            except OSError:
                with suppress(OSError):
                    _end_with_a_line(path)
                raise

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = JournalFileSymlinkLock(str(path), grace_period=LOCK_S)
    return JournalStorage(WholeLines(str(path), lock))


def _end_with_a_line(path: Path) -> None:
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end:
            start = max(0, end - 4096)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)
