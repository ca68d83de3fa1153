"""What a tracking server does not have yet, kept in the run so that a later process can send it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distdl.redact import hide_shapes, looks_secret
from distdl.redact import redact as without_secrets

KEPT = "artifacts"  # in RUN/tracking: copies of files that are owed


def write_json(path: Path, value: Any) -> None:
    """Replace a file in one step: a reader sees the old or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


def redact(address: str) -> str:
    """A server's address without password, token and query, each of which may be a secret."""
    plain = re.sub(r"\?.*", "?***", re.sub(r"(://[^/:@]*):.*@", r"\1:***@", address))
    return hide_shapes(plain)  # https://<token>@host


def is_local(address: str) -> bool:
    """Whether this is a database file, which several hosts must not write at the same time."""
    return address.startswith("sqlite:")


def database_path(address: str) -> Path:
    """The file behind a `sqlite:///` address, absolute."""
    return Path(address.removeprefix("sqlite:///")).absolute()


@dataclass
class State:
    """What is known and what is owed; `RUN/tracking/mlflow.json`.

    Args:
        server: The tracking URI, redacted; None is the project's own database.
        output_dir: The folder of the project's database, relative to the run directory, so that
            both can be moved together.
        run_id: MLflow's name of the run, once it is known.
        job_run: The run belongs to the platform's job (Azure ML), which ends it.
        key: Tagged onto the run when it is made: finds it when the answer of the server was lost.
        params, tags, artifacts, status, end_time: Owed. `artifacts` are (path relative to the run
            directory, folder in the run) pairs; `end_time` is in seconds since 1970.
    """

    distdl_run: str = ""
    server: str | None = None
    output_dir: str = ".."
    artifact_location: str | None = None
    experiment: str = "Default"
    run_id: str | None = None
    job_run: bool = False
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    start_time: float = field(default_factory=time.time)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: list[list[str]] = field(default_factory=list)
    status: str | None = None
    end_time: float | None = None


class Outbox:
    """A `State` with its file. The training thread and the sender both change it, so: a lock."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / "tracking" / "mlflow.json"
        self.lock = threading.RLock()
        self.state = State()
        self.found = self.load()
        self.lost = False  # an earlier attempt had a file that is gone: search by the run's name

    def load(self) -> bool:
        """Read the file again. False if there is none, or none that can be read."""
        try:
            fields = json.loads(self.path.read_text())
            with self.lock:
                known = State.__dataclass_fields__
                self.state = State(**{k: v for k, v in fields.items() if k in known})
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

    def is_empty(self) -> bool:
        return not (self.state.params or self.state.tags or self.state.artifacts)

    def owe(self, kind: str, values: Mapping[str, Any], longest: int = 5000) -> None:
        """Add params or tags, without secrets. Of a parameter that is owed, the value stays."""
        told = {
            str(k): "***" if looks_secret(str(k).replace("/", ".")) else without_secrets(str(v))
            for k, v in values.items()
        }
        owed = getattr(self.state, kind)
        with self.lock, contextlib.suppress(OSError):  # a full disk: the sender says so
            owed |= {k: v[:longest] for k, v in told.items() if kind == "tags" or k not in owed}
            self.save()

    def keep(self, file: str, folder: str) -> None:
        """Owe a copy of a file to a folder, in place of one of its name that is owed there."""
        copy = self.path.parent / KEPT / folder / os.path.basename(file)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path.parent) as there:
            whole = shutil.copyfile(file, Path(there) / "whole")
            with self.lock:
                os.replace(whole, copy)
                item = [os.path.relpath(copy, self.run_dir), folder]
                owed = self.state.artifacts
                self.state.artifacts = [*(other for other in owed if other != item), item]
                self.save()

    def put_last(self, item: list[str]) -> None:
        with self.lock:
            self.state.artifacts = sorted(self.state.artifacts, key=lambda other: other is item)

    def strike(self, item: list[str]) -> None:
        """Take off this artifact, and its copy; not a newer one that has taken its place."""
        with self.lock:
            rest = [other for other in self.state.artifacts if other is not item]
            if len(rest) < len(self.state.artifacts):
                self.state.artifacts = rest
                self.save()
                copy = (self.run_dir / item[0]).resolve()
                if copy.is_relative_to(self.run_dir.resolve() / "tracking" / KEPT):
                    copy.unlink(missing_ok=True)

    def sent(self, kind: str, values: dict[str, str]) -> None:
        """Strike params or tags off, unless they changed while they were being sent."""
        with self.lock:
            owed = getattr(self.state, kind)
            for key, value in values.items():
                if owed.get(key) == value:
                    del owed[key]
            self.save()


class Cursor:
    """How far one node's journal has been delivered to one MLflow run."""

    def __init__(self, run_dir: Path, node_rank: int) -> None:
        self.path = Path(run_dir) / "tracking" / f"mlflow-node{node_rank}.json"

    def offset(self, run_id: str) -> int:
        """Bytes of the journal that this run has; 0 for a run that is not the recorded one."""
        try:
            fields = json.loads(self.path.read_text())
            return int(fields["offset"]) if fields["run_id"] == run_id else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def move(self, run_id: str, offset: int) -> None:
        write_json(self.path, {"run_id": run_id, "offset": offset})
