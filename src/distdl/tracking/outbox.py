"""What a tracking server does not have yet, kept in the run so that a later process can send it."""

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
from distdl.util.redact import hide_shapes, looks_secret
from distdl.util.redact import redact as without_secrets

log = logging.getLogger(__name__)


def redact(address: str) -> str:
    """A server's address without password, token and query: each may be a secret."""
    plain = re.sub(r"\?.*", "?***", re.sub(r"(://[^/:@]*):.*@", r"\1:***@", address))
    return hide_shapes(plain)  # https://<token>@host


def redacted(values: Mapping[str, Any], longest: int = 500) -> dict[str, str]:
    """Values as strings of at most `longest` characters, without secrets."""
    texts = {str(k): without_secrets(str(v))[:longest] for k, v in values.items()}
    return {k: "***" if looks_secret(k.replace("/", ".")) else v for k, v in texts.items()}


def is_local(address: str) -> bool:
    """Whether this is a database file, which several hosts must not write at the same time."""
    return address.startswith("sqlite:")


def database_path(address: str) -> Path:
    """The file behind a `sqlite:///` address, absolute."""
    return Path(address.removeprefix("sqlite:///")).absolute()


@dataclass
class State:
    """What is known and what is still to be sent; `RUN/tracking/mlflow.json`."""

    distdl_run: str = ""
    server: str | None = None  # the tracking URI, redacted; None: the project's own database
    output_dir: str = ".."  # of that database, relative to the run, so that both can be moved
    artifact_location: str | None = None
    experiment: str = "Default"
    name: str = ""
    run_id: str | None = None  # MLflow's, once it is known
    experiment_id: str | None = None
    job_run: bool = False  # the run belongs to the platform's job (Azure ML), which ends it
    # A tag set when the run is created. It finds the run if the server's answer was lost.
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    start_time: float = field(default_factory=time.time)
    # Still to be sent, as are the files in `RUN/tracking/artifacts` under their relative paths.
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    status: str | None = None
    end_time: float | None = None  # in seconds since 1970


class Outbox:
    """A `State` and its file. The training thread and the sender change it under a lock."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.state = Path(run_dir), State()
        self.path = self.run_dir / "tracking" / "mlflow.json"
        self.copies = self.run_dir.resolve() / "tracking" / "artifacts"  # of files to send
        self.lock = threading.RLock()
        self.renewed: set[Path] = set()  # copies that were replaced while they were being sent
        self.found = self.load()
        self.lost = False  # an earlier attempt had a file that is gone: search by the run's name

    def load(self) -> bool:
        """Reads the file again. False if there is none, or if it cannot be read."""
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

    def owe(self, kind: str, values: Mapping[str, Any], longest: int = 5000) -> None:
        """Adds params or tags to send, without secrets. A pending parameter keeps its value."""
        texts = redacted(values, longest)
        with self.lock, contextlib.suppress(OSError):  # the sender reports a full disk
            owed = getattr(self.state, kind)
            owed |= {k: v for k, v in texts.items() if kind == "tags" or k not in owed}
            self.save()

    def keep(self, path: str | Path, to: str) -> None:
        """Adds a copy of a file, or of all files in a folder, to send, in place of a pending one of
        the same name. An OSError if the path does not exist; a full disk only causes a warning."""
        if os.path.isdir(path):
            for name in os.listdir(path):
                self.keep(os.path.join(path, name), os.path.join(to, name))
            return
        os.stat(path)
        copy = self.copies / to
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
                complete = shutil.copyfile(path, Path(folder) / "complete")
                with self.lock:
                    os.replace(complete, copy)
                    self.renewed.add(copy)
        except OSError as error:
            log.warning("%s is not kept for MLflow: %s", path, error)

    def kept(self) -> Iterator[Path]:
        """The copies to send. Skips links: in a run from elsewhere they may lead out of it."""
        for folder, _, names in os.walk(self.copies):
            paths = (Path(folder, name) for name in names)
            yield from (path for path in paths if path.resolve() == path)

    def sent(self, kind: str, values: dict[str, str]) -> None:
        """Removes params or tags that were sent, unless they changed while they were being sent."""
        with self.lock:
            owed = getattr(self.state, kind).items()
            setattr(self.state, kind, {k: v for k, v in owed if values.get(k) != v})
            self.save()


class Cursor:
    """How far one node's journal has been delivered to one MLflow run."""

    def __init__(self, run_dir: Path, node_rank: int) -> None:
        self.path = Path(run_dir) / "tracking" / f"mlflow-node{node_rank}.json"

    def offset(self, run_id: str) -> int:
        """The bytes of the journal that this run has; 0 for a run other than the recorded one."""
        try:
            fields = json.loads(self.path.read_text())
            return int(fields["offset"]) if fields["run_id"] == run_id else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def move(self, run_id: str, offset: int) -> None:
        write_json(self.path, {"run_id": run_id, "offset": offset})
