"""A run's directory: the frozen config once, a folder for each attempt, and what they leave.

    outputs/<experiment>/<name>/
        config.yaml         the recipe, frozen
        provenance.json     commit, command, packages
        attempts/001/       launch.yaml, status.json, errors/, logs/
        checkpoints/  logs/  tracking/

Files are written under a temporary name and renamed, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl.errors import Problem, UserError
from distdl.job import EXIT_REFUSED, JobState, Resources

CONFIG, PROVENANCE = "config.yaml", "provenance.json"


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Writes a file as a whole or not at all; if `durable`, on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several hosts may write the same file at once, and process numbers repeat among them.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    temporary.write_text(text)
    if durable:
        sync(temporary)
    os.replace(temporary, path)
    if durable:
        sync(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    text = json.dumps(value, indent=2, sort_keys=False, default=str) + "\n"
    write_text(path, text, durable=durable)


def sync(path: Path) -> None:
    """Waits until a file's bytes, or the names in a folder, are on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError:
        if not path.is_dir():  # some file systems (blobfuse) cannot sync a folder
            raise


def read_json(path: Path) -> dict[str, Any]:
    """Empty if the file is absent or torn."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True)
class Attempt:
    """One start of a run."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def launch(self) -> dict[str, Any]:
        """Where it runs: `where`, `resources`, `changes`, `global_batch_size`."""
        loaded = OmegaConf.load(self.path / "launch.yaml")
        return OmegaConf.to_container(loaded, resolve=False)  # type: ignore[return-value]

    def resources(self) -> Resources:
        size = dict(self.launch()["resources"])
        ids = size.pop("device_ids", None)
        return Resources(**size, device_ids=tuple(map(str, ids)) if ids else None)

    def status(self) -> dict[str, Any]:
        return read_json(self.path / "status.json")

    def state(self) -> JobState:
        """The state on record; a RUNNING one whose process is gone from this host has failed.

        That of a job which lives elsewhere is for `distdl.jobs` to say.
        """
        status = self.status()
        state = JobState(status.get("state", "UNKNOWN"))
        if self.job():
            return state
        if state is JobState.RUNNING and status.get("host") == socket.gethostname():
            return state if is_alive(int(status.get("pid", 0))) else JobState.FAILED
        return state

    def is_under_way(self) -> bool:
        """Whether it runs, or is being started by a process of this host."""
        status = self.status()
        if self.state() is JobState.PENDING and status.get("host") == socket.gethostname():
            return is_alive(int(status.get("pid", 0))) and status.get("pid") != os.getpid()
        return self.state() is JobState.RUNNING

    def job(self) -> dict[str, Any]:
        """The job that a launcher submitted for this attempt: `handle`, `url`; empty if none."""
        return read_json(self.path / "job.json")

    def update(self, **fields: Any) -> None:
        """Merges `fields` into status.json."""
        write_json(self.path / "status.json", {**self.status(), **fields})

    def begin(self) -> None:
        """Rank 0 is here. Of an attempt that its scheduler started again, what went wrong before
        is kept apart."""
        restarts = self.status().get("restarts")
        restarts = 0 if restarts is None else restarts + 1
        if restarts and (self.path / "errors").is_dir():
            os.replace(self.path / "errors", self.path / f"errors-{restarts:03d}")
        self.update(
            state=JobState.RUNNING,
            started=time.time(),
            ended=None,
            host=socket.gethostname(),
            pid=os.getpid(),
            error=None,
            restarts=restarts,
        )

    def end(self, state: JobState, **fields: Any) -> None:
        self.update(state=state, ended=time.time(), exit_code=state.exit_code, **fields)

    def conclude(self, place: JobState, code: int | None = None) -> JobState:
        """The job has ended: puts on record what the run did not say itself.

        Args:
            place: How it ended as its place knows it.
            code: The exit code, where one process stands for the job.
        """
        recorded = JobState(self.status().get("state", "UNKNOWN"))
        first = self.first_error()
        if first:  # whatever rank 0 made of it
            self.end(
                JobState.FAILED,
                error=f"rank {first['rank']}: {told(first)}",
            )
            code = first.get("exit_code", code)
        elif recorded.ended and not (code and recorded is JobState.SUCCEEDED):
            # A scheduler's cancel and its preemption are the same signal to a worker.
            if recorded is JobState.PREEMPTED and place is JobState.CANCELLED:
                self.update(state=place, exit_code=place.exit_code)
        elif recorded is JobState.PENDING and place is JobState.SUCCEEDED and not code:
            self.end(place)  # its store is elsewhere
        else:
            agreed = place in (JobState.CANCELLED, JobState.PREEMPTED)
            said = f"a worker ended with exit code {code}" if code else "it ended without a word"
            self.end(place if agreed else JobState.FAILED, error=said)
        state = JobState(self.status()["state"])
        if state is JobState.FAILED and code is not None and code > 0:
            self.update(exit_code=code)
        self.update(concluded=True)
        return state

    def record_error(
        self, rank: int, kind: str, message: str, traceback: str, exit_code: int = 1
    ) -> None:
        """A rank's own failure: torchrun, mpirun and srun swallow exit codes and messages.

        Its first one stays: what follows while it takes itself down is not the cause.
        """
        path = self.path / "errors" / f"rank_{rank}.json"
        if path.exists():
            return
        fields = {
            "time": time.time(),
            "rank": rank,
            "host": socket.gethostname(),
            "type": kind,
            "message": message,
            "exit_code": exit_code,
        }
        write_json(path, {**fields, "traceback": traceback})

    def first_error(self) -> dict[str, Any] | None:
        """The earliest failure of any rank: the others usually fail because of it."""
        errors = [read_json(f) for f in (self.path / "errors").glob("rank_*.json")]
        return min((e for e in errors if e), key=lambda e: e["time"], default=None)


def told(error: dict[str, Any]) -> str:
    """What a recorded error says. A refusal speaks for itself; else the type is a part of it."""
    refused = error.get("exit_code") == EXIT_REFUSED and error["type"] != "SystemExit"
    return str(error["message"] if refused else f"{error['type']}: {error['message']}")


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exists(self) -> bool:
        return (self.path / CONFIG).is_file()

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run.

        Raises:
            UserError: There is none; names the runs that lie near.
        """
        from distdl.tracking.records import find_run

        run = cls(find_run(str(path)).resolve())
        if not run.exists:
            raise UserError(Problem(str(path), "has no config.yaml, so it cannot go on"))
        return run

    def create(self, recipe: str, provenance: dict[str, Any]) -> None:
        """Lays the run down. `config.yaml` comes last: with it, the run exists."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / PROVENANCE, provenance)
        write_text(self.path / CONFIG, recipe)

    def recipe(self) -> DictConfig:
        config = OmegaConf.load(self.path / CONFIG)
        assert isinstance(config, DictConfig)
        return config

    def attempts(self) -> list[Attempt]:
        folders = (self.path / "attempts").glob("[0-9]*")
        own = [f for f in sorted(folders) if not f.is_symlink()]  # a link leads into another run
        return [Attempt(f) for f in own if (f / "launch.yaml").exists()]

    def last_attempt(self) -> Attempt | None:
        return (self.attempts() or [None])[-1]  # type: ignore[list-item]

    def begin_attempt(self, launch: dict[str, Any]) -> Attempt:
        """The next attempt. Its folder is made exclusively, so two starts never share one.

        Raises:
            UserError: An attempt of this run is running.
        """
        last = self.last_attempt()
        if last is not None and last.is_under_way():
            status = last.status()
            remedy = "wait for it, stop it, or start a run with another name"
            if status.get("host") != socket.gethostname() or last.job():
                remedy += f"; if it is gone: rm {last.path / 'status.json'}"
            raise UserError(
                Problem(
                    str(self.path),
                    f"attempt {last.number} is running (pid {status.get('pid')} on "
                    f"{status.get('host')}, started {time.ctime(status.get('started', 0))})",
                    remedy,
                )
            )
        number = last.number + 1 if last else 1
        path = self.path / "attempts" / f"{number:03d}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            remedy = f"if it is not: rmdir {path}"
            raise UserError(Problem(str(path), "another start is under way", remedy)) from None
        write_text(path / "launch.yaml", OmegaConf.to_yaml(OmegaConf.create(launch)))
        attempt = Attempt(path)
        attempt.update(
            state=JobState.PENDING,
            started=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        return attempt


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    # A zombie still has its number, and has ended.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return True


def shown(path: Path) -> str:
    """Short, as a person would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
