"""What a tracking server does not have yet, kept in the run so that a later process can send it."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distdl.redact import hide_shapes


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
