"""What the tracking server lacks, kept in the run so that a later process can send it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distdl.runs.files import write_json
from distdl.util.names import kept_apart
from distdl.util.redact import redact as without_secrets
from distdl.util.secret_names import looks_secret
from distdl.util.secret_shapes import hide_shapes

log = logging.getLogger(__name__)

# Tags of a trial of a search: its study, and what identifies that.
STUDY, STUDY_KEY = "distdl.study", "distdl.study_key"

# The names that `own_artifact` makes.
OWN_ARTIFACT = re.compile(r"(attempts/\d{3,}/)?(config\.yaml|provenance\.json|packages\.txt)")


def redact(address: str) -> str:
    """A server's address without its password, token and query, which may be secrets."""
    plain = re.sub(r"\?.*", "?***", re.sub(r"(://[^/:@]*):.*@", r"\1:***@", address))
    return hide_shapes(plain)  # https://<token>@host


def redacted(values: Mapping[str, Any], longest: int = 500) -> dict[str, str]:
    """Values as strings of at most `longest` characters, without secrets."""
    texts = {str(k): without_secrets(str(v))[:longest] for k, v in values.items()}
    return {k: "***" if looks_secret(k.replace("/", ".")) else v for k, v in texts.items()}


def is_local(address: str) -> bool:
    """Whether the address is a database file, which several hosts must not write at once."""
    return address.startswith("sqlite:")


def database_path(address: str) -> Path:
    """The file behind a `sqlite:///` address, absolute."""
    return Path(address.removeprefix("sqlite:///")).absolute()


def own_artifact(name: str, attempt: int) -> str:
    """Where MLflow has a file that describes an attempt."""
    return name if attempt == 1 else f"attempts/{attempt:03d}/{name}"


@dataclass
class State:
    """Facts about the MLflow run, and what is still to be sent: `RUN/tracking/mlflow.json`."""

    distdl_run: str = ""
    server: str | None = None  # the tracking URI, redacted; None: the project's own database
    output_dir: str = ".."  # folder of the database, relative to the run: both may be moved
    artifact_location: str | None = None
    experiment: str = "Default"
    name: str = ""
    run_id: str | None = None  # MLflow's, once it is known
    experiment_id: str | None = None
    job_run: bool = False  # the run belongs to the platform's job (Azure ML), which ends it
    # A tag of the MLflow run, by which other nodes find it, and this one if the server's answer or
    # this file was lost. Not the run's name, which runs in other folders may have too.
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    start_time: float = field(default_factory=time.time)
    # The rest is still to be sent, and so are the files in `RUN/tracking/artifacts`.
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    status: str | None = None
    end_time: float | None = None  # in seconds since 1970


class Outbox:
    """A `State` and its file, which the training thread and the sender change under a lock."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self.state = State()
        self.path = self.run_dir / "tracking" / "mlflow.json"
        self.copies = self.run_dir.resolve() / "tracking" / "artifacts"  # of files to send
        self.lock = threading.RLock()
        self.replaced: set[Path] = set()  # copies that were replaced while they were being sent
        self.exists = self.load()

    def load(self) -> bool:
        """Reads the file. Returns False if that is not possible."""
        try:
            fields = json.loads(self.path.read_text())
            with self.lock:
                names = State.__dataclass_fields__.keys() & fields.keys()
                self.state = State(**{name: fields[name] for name in names})
            return True
        except (OSError, ValueError, TypeError, AttributeError):
            return False

    def save(self) -> None:
        with self.lock:
            write_json(self.path, asdict(self.state))

    def database(self) -> str:
        """The address of the project's own database."""
        folder = os.path.normpath(self.run_dir.absolute() / self.state.output_dir)
        return f"sqlite:///{folder}/mlflow.db"

    def add(self, kind: str, values: Mapping[str, Any], longest: int = 5000) -> None:
        """Adds params or tags to send, redacted. A pending parameter keeps its value."""
        texts = redacted(values, longest)
        with self.lock, contextlib.suppress(OSError):  # the sender reports a full disk
            pending = getattr(self.state, kind)
            pending |= {k: v for k, v in texts.items() if kind == "tags" or k not in pending}
            self.save()

    def add_own(self, path: Path, attempt: int) -> None:
        """Adds a file that describes the run, such as config.yaml."""
        self.add_file(path, own_artifact(path.name, attempt), ours=True)

    def add_file(self, path: str | Path, to: str, ours: bool = False) -> None:
        """Adds a copy of a file, or of all files in a folder, to send. It replaces a pending file
        of the same name. Raises an OSError if the path is missing. A full disk causes a warning.

        A module's file gets a name of its own if it would replace one that describes the run.
        """
        if os.path.isdir(path):
            for name in os.listdir(path):
                self.add_file(os.path.join(path, name), os.path.join(to, name), ours)
            return
        os.stat(path)
        folder, name = os.path.split(os.path.normpath(to))
        if not ours and OWN_ARTIFACT.fullmatch(os.path.join(folder, name)):
            stem, ending = os.path.splitext(name)
            to = os.path.join(folder, kept_apart(name, f"{stem}-yours") + ending)
            text = "%s describes the run in MLflow, so the file %s is sent as %s"
            log.warning(text, os.path.join(folder, name), path, to)
        copy = self.copies / to
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
                complete = shutil.copyfile(path, Path(folder) / "complete")
                with self.lock:
                    os.replace(complete, copy)
                    self.replaced.add(copy)
        except OSError as error:
            log.warning("%s cannot be copied for MLflow and is not sent: %s", path, error)

    def files(self) -> Iterator[Path]:
        """The copies to send, without links: in another user's run they may lead out of it."""
        for folder, _, names in os.walk(self.copies):
            paths = (Path(folder, name) for name in names)
            yield from (path for path in paths if path.resolve() == path)

    def mark_sent(self, kind: str, values: dict[str, str]) -> None:
        """Removes params or tags that were sent, unless they have changed meanwhile."""
        with self.lock:
            pending = getattr(self.state, kind).items()
            setattr(self.state, kind, {k: v for k, v in pending if values.get(k) != v})
            self.save()


class Cursor:
    """Records how far one node's journal has been sent to one MLflow run."""

    def __init__(self, run_dir: Path, node_rank: int) -> None:
        self.path = Path(run_dir) / "tracking" / f"mlflow-node{node_rank}.json"

    def offset(self, run_id: str) -> int:
        """The number of bytes of the journal that were sent to this MLflow run."""
        try:
            fields = json.loads(self.path.read_text())
            return int(fields["offset"]) if fields["run_id"] == run_id else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def move(self, run_id: str, offset: int) -> None:
        write_json(self.path, {"run_id": run_id, "offset": offset})
