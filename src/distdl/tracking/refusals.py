"""Errors of an MLflow server that last until somebody acts. An outage passes by itself."""

from __future__ import annotations

import contextlib
import errno
import re
import shlex
import sqlite3
import textwrap

from distdl.tracking import schema
from distdl.tracking.outbox import database_path, is_local, redact
from distdl.util.errors import LastingRefusal

CREDENTIALS = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, to valid "
    "ones"
)
RIGHTS = "ask its administrator for the right to write to the experiment, or use other credentials"
QUOTA = "delete what is not needed there, or ask its administrator for more"
ADDRESS = "correct the address: MLFLOW_TRACKING_URI or tracking.mlflow.tracking_uri"
WRITABLE = "make the database and its folder writable, or choose another: MLFLOW_TRACKING_URI"
STORE = "give this machine the right to write to the experiment's artifacts"
OTHER = "tracking.mlflow.experiment_name=NAME"

# By MLflow's code or the status of HTTP: what it means, and what helps.
ANSWERS = {
    **dict.fromkeys(
        ("401", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"),
        ("does not accept the credentials", CREDENTIALS),
    ),
    **dict.fromkeys(("403", "PERMISSION_DENIED"), ("does not permit this", RIGHTS)),
    **dict.fromkeys(
        ("507", "RESOURCE_EXHAUSTED"), ("has no room left: its quota is used up", QUOTA)
    ),
    **dict.fromkeys(
        ("301", "302", "307", "308", "404", "405", "ENDPOINT_NOT_FOUND"),
        ("does not answer like an MLflow server", ADDRESS),
    ),
}
# By a part of the message, where there is no code: of databases, clients and stores of artifacts.
MESSAGES = {
    "not in a valid JSON format": ("does not answer like an MLflow server", ADDRESS),
    "unsupported URI": (
        "is an address of an unknown kind",
        f"{ADDRESS} (azureml://: pip install azureml-mlflow)",
    ),
    "maintenance mode": (
        "is a folder, which this version of MLflow does not write",
        "MLFLOW_TRACKING_URI=sqlite:///FILE",
    ),
    "CERTIFICATE_VERIFY_FAILED": (
        "has a certificate that is not trusted here",
        "MLFLOW_TRACKING_SERVER_CERT_PATH=CA.pem",
    ),
    "readonly database": ("cannot be written", WRITABLE),
    "read-only transaction": ("cannot be written", WRITABLE),
    "unable to open database file": ("cannot be opened", WRITABLE),
    "disk is full": ("has no room left", "make room on its disk"),
    "disk image is malformed": ("is damaged", "restore it from a copy, or move it away"),
    "file is not a database": ("is damaged", "restore it from a copy, or move it away"),
    "AccessDenied": ("keeps artifacts where they cannot be written", STORE),
    "NoSuchBucket": ("keeps artifacts in a bucket that does not exist", STORE),
    "ContainerNotFound": ("keeps artifacts in a container that does not exist", STORE),
    "AuthorizationPermissionMismatch": ("keeps artifacts where they cannot be written", STORE),
    "Unable to locate credentials": ("keeps artifacts where they cannot be written", STORE),
}
LONGEST = 300  # characters of a server's words
FILES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)


def status_of(error: Exception) -> str:
    """The status of the HTTP answer, as text; "" if the error is of another kind."""
    answer = getattr(getattr(error, "response", None), "status_code", None)  # of an artifact
    told = re.search(r"failed with error code (\d{3}) ", str(error))  # MLflow's own words
    return str(answer or "") or (told[1] if told else "")


def described(error: Exception, uri: str) -> str:
    """The server's words, without its password, and without the statement of a database."""
    text = str(error).replace(uri, redact(uri)).partition("[SQL:")[0]
    text = textwrap.shorten(text, LONGEST, placeholder=" ...")
    if "too many 429 " in text:  # MLflow's client hides the rest of such an answer
        text += " (429: it limits requests, or a quota is used up: ask its administrator)"
    return text


def refusal(error: Exception, uri: str) -> LastingRefusal | None:
    """What an error means if it will come again every time; None if it may pass."""
    if isinstance(error, LastingRefusal):
        return error
    if isinstance(error, ImportError) and error.name:
        return LastingRefusal(
            f"needs the package {error.name}", f"pip install {error.name.split('.')[0]}"
        )
    if misfit := schema.told_by(str(error), uri):
        return LastingRefusal(*misfit)
    status = status_of(error)
    code = str(getattr(error, "error_code", ""))
    told = described(error, uri)
    if status == "429":  # its code is that of a quota
        return None
    for answer in (status, code):
        if answer in ANSWERS:
            what, remedy = ANSWERS[answer]
            return LastingRefusal(f"{what} ({told})", remedy)
    for part, (what, remedy) in MESSAGES.items():
        if part in str(error):
            return LastingRefusal(f"{what} ({told})", remedy)
    if isinstance(error, OSError) and error.errno in FILES:
        return LastingRefusal(f"cannot be written ({told})", WRITABLE)
    return None


def deleted(uri: str, name: str, experiment_id: str) -> LastingRefusal:
    """The refusal of an experiment that is in MLflow's bin, where its name is still taken."""
    command = f"mlflow experiments restore --experiment-id {shlex.quote(experiment_id)}"
    if "***" not in redact(uri):
        command = f"MLFLOW_TRACKING_URI={shlex.quote(uri)} {command}"
    return LastingRefusal(
        f"has the experiment {name!r} in its bin: it was deleted", f"{command}, or {OTHER}"
    )


def schema_of(uri: str) -> LastingRefusal | None:
    """The refusal of a database file that has another schema; None if it is no such file."""
    misfit = schema.misfit(uri)
    return LastingRefusal(*misfit) if misfit else None


def deleted_in(uri: str, name: str) -> LastingRefusal | None:
    """The same, read in a moment from a database file; None if it is no such file."""
    path = database_path(uri) if is_local(uri) else None
    if path is None or not path.is_file():
        return None
    query = "SELECT experiment_id, lifecycle_stage FROM experiments WHERE name = ?"
    with contextlib.suppress(sqlite3.Error):
        address = f"{path.as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=1)) as database:
            for number, stage in database.execute(query, (name,)):
                return deleted(uri, name, str(number)) if stage == "deleted" else None
    return None
