"""One start of a run: attempts/NNN with launch.yaml, status.json, errors/ and logs/."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from distdl.config.recipe import to_yaml
from distdl.job import JobState, Resources
from distdl.runs import conclusion, failures, files, records
from distdl.runs.files import write_json
from distdl.util.errors import Damaged
from distdl.util.processes import is_alive, this_process
from distdl.util.redact import redact
from distdl.util.strict_json import numbers

LAUNCH, STATUS, RANKS = "launch.yaml", "status.json", "ranks.json"
NUMBER = (int, float)
STATUS_SHAPE: files.Shape = {
    **dict.fromkeys(("state", "host", "birth", "folder", "error", "not_restarted", "data"), str),
    **dict.fromkeys(("pid", "inode", "exit_code", "restarts"), int),
    **dict.fromkeys(("started", "ended"), NUMBER),
    **dict.fromkeys(("metrics", "parameters", "slow"), dict),
    "would_fit": list,
    "killed": bool,
}
LAUNCH_SHAPE: files.Shape = {"run_id": str, "where": dict}


class RankProcess(NamedTuple):
    """A rank, its process, and the one that started it: each as `pid:start time`."""

    rank: int
    host: str
    process: str
    agent: str


def moment(value: object) -> float | None:
    """A time as a status.json states it, in seconds since 1970; None if it is missing, no number,
    or beyond what a date can show."""
    if isinstance(value, NUMBER) and value and abs(value) < 1e11:
        return float(value)
    return None


def place_of(folder: Path, name: Path | None = None) -> dict[str, Any]:
    """Identifies the folder of an attempt in a record: a copy of it has another path and inode.

    Args:
        name: The path that the folder will get, if it is another one.
    """
    return {"folder": str((name or folder).resolve()), "inode": folder.stat().st_ino}


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

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    def launch(self) -> dict[str, Any]:
        """Where it runs: `where`, `resources`, `changes`, `global_batch_size`. Raises `Damaged` if
        the file is absent, truncated, changed, or of another shape."""
        return files.load_yaml(self.path / LAUNCH, LAUNCH_SHAPE, self._launch_remedy())

    @property
    def task(self) -> str:
        """The `_target_` of the task, "" if launch.yaml has none."""
        return str(((self.launch().get("where") or {}).get("task") or {}).get("_target_") or "")

    def check_launch(self) -> None:
        """Raises `Damaged` if `launch` cannot be read."""
        files.check_yaml(self.path / LAUNCH, LAUNCH_SHAPE, self._launch_remedy())

    def _launch_remedy(self) -> str:
        aside = self.path.with_name(f"damaged-{self.path.name}")
        run = self.path.parents[1]
        return (
            "restore it, or, once no process of this attempt runs any more, move the attempt aside "
            f"and resume: mv {self.path} {aside} && python -m distdl resume {run}"
        )

    def write_launch(self, record: dict[str, Any]) -> None:
        files.write_stamped(self.path / LAUNCH, to_yaml(OmegaConf.create(record)))

    def resources(self, launch: dict[str, Any] | None = None) -> Resources:
        """The number of nodes and devices, and the accelerator. Raises `Damaged` if launch.yaml
        (`launch`, if the caller has read it) does not state them."""
        size = dict((launch or self.launch()).get("resources") or {})
        ids = size.pop("device_ids", None)
        try:
            return Resources(**size, device_ids=tuple(map(str, ids)) if ids else None)
        except TypeError:
            raise Damaged(self.path / LAUNCH, f"resources is {size}", "restore it") from None

    def status(self) -> dict[str, Any]:
        """The contents of status.json, empty if there is none. Raises `Damaged` if the file is
        truncated, of another shape, or has an unknown state."""
        path = self.path / STATUS
        remedy = f"make sure that no process of this attempt runs any more, and then: rm {path}"
        status = files.load_json(path, STATUS_SHAPE, remedy)
        if status.get("state") is not None and status["state"] not in list(JobState):
            raise Damaged(path, f"state is {status['state'][:40]!r}", remedy)
        if status.get("metrics"):
            status["metrics"] = numbers(status["metrics"])
        for name, value in (status.get("metrics") or {}).items():
            if not isinstance(value, NUMBER):
                raise Damaged(path, f"metrics.{name} is {str(value)[:40]!r}", remedy)
        return status

    def state(self) -> JobState:
        """The recorded state; FAILED if it is pending or running and its process on this host is
        gone. For a job that runs elsewhere, ask `distdl.launch.jobs`."""
        status = self.status()
        recorded = JobState(status.get("state") or "UNKNOWN")
        remote = status.get("host") != socket.gethostname()
        if recorded not in (JobState.PENDING, JobState.RUNNING) or self.job() or remote:
            return recorded
        alive = is_alive(status.get("pid") or 0, status.get("birth")) and not self.copy_of(status)
        return recorded if alive else JobState.FAILED

    def copy_of(self, record: Mapping[str, Any]) -> str:
        """The folder for which this host wrote a record that has the keys of `place_of`, if this
        attempt is a copy of that folder; "" if it is the same, also after it was moved."""
        folder = str(record.get("folder") or "")
        if not folder or record.get("host") != socket.gethostname():
            return ""  # another host may see the same folder under other names
        here = place_of(self.path)
        return "" if here["folder"] == folder or here["inode"] == record.get("inode") else folder

    def is_under_way(self) -> bool:
        """Whether it runs or is being started, as far as this host can know. (For a job that waits
        in a queue, ask `distdl.launch.jobs`.)"""
        state = self.state()
        if state is JobState.PENDING:
            return not self.is_starting_here() and not self.job()
        return state is JobState.RUNNING

    def is_starting_here(self) -> bool:
        """Whether this very process is starting it, and no other process has taken it over."""
        status = self.status()
        same = this_process().items() <= status.items()
        return same and status.get("state") == JobState.PENDING and not self.job()

    def job(self) -> dict[str, Any]:
        """The job that a launcher submitted for this attempt: `handle`, `url`; empty if none.
        Raises `Damaged` if the file is truncated or of another shape."""
        path = self.path / "job.json"
        remedy = 'write the job\'s handle into it again: {"handle": "slurm://123", "url": null}'
        job = files.load_json(path, {"handle": str, "url": str}, remedy)
        if path.exists() and not job.get("handle"):
            raise Damaged(path, "it has no handle", remedy)
        return job

    def update(self, **fields: object) -> None:
        """Merges `fields` into status.json. A damaged file is kept beside it and replaced by a new
        one, since continuing the run is worth more than the old contents."""
        error = fields.get("error")
        if isinstance(error, str):  # may have an exception's text
            fields["error"] = redact(error)
        before = self._status_or_new()
        after = {**before, **fields}
        if after != before:
            write_json(self.path / STATUS, after)

    def _status_or_new(self) -> dict[str, Any]:
        try:
            return self.status()
        except Damaged:
            os.replace(self.path / STATUS, self.path / f"{STATUS}.damaged")
            return {}

    def begin(self) -> None:
        """Called when rank 0 has started. If a scheduler has restarted the attempt, the files
        about the failure of the previous start get other names (errors-001)."""
        restarts = self._status_or_new().get("restarts")
        restarts = 0 if restarts is None else restarts + 1
        for path in map(self.path.joinpath, ("errors", "health", "incident.json", "incident.md")):
            if restarts and path.exists():
                os.replace(path, path.with_name(f"{path.stem}-{restarts:03d}{path.suffix}"))
        self.update(
            state=JobState.RUNNING,
            started=time.time(),
            ended=None,
            error=None,
            restarts=restarts,
            **this_process(),
            **place_of(self.path),
        )

    def end(self, state: JobState, **fields: object) -> None:
        self.update(**{**_ended(state), **fields})

    def fail(self, error: str, exit_code: int) -> None:
        self.end(JobState.FAILED, error=error, exit_code=exit_code)

    def conclude(self, seen: JobState, code: int | None = None, killed: str = "") -> JobState:
        """Called when the job has ended: records what the run did not record itself.

        Args:
            seen: How it ended according to its platform.
            code: The exit code, if the job ran as one process.
            killed: What ended the job from outside (except a preemption), as a sentence.
        """
        recorded = JobState(self._status_or_new().get("state") or "UNKNOWN")
        ending = conclusion.Ending(recorded, seen, code, killed, self.first_error())
        concluded = conclusion.conclude(ending)
        fields: dict[str, Any] = _ended(concluded.state) if concluded.ends else {}
        fields |= concluded.fields
        if concluded.state is JobState.FAILED and concluded.code is not None and concluded.code > 0:
            fields["exit_code"] = concluded.code
        journal = records.journal_path(self.path.parents[1])
        with suppress(OSError):
            fields["journal_bytes"] = journal.stat().st_size  # a shorter one was cut since
        self.update(**fields, concluded=True)
        return concluded.state

    def record_ranks(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Records the processes of the ranks, once these are connected."""
        rows = [{key: each[key] for key in RankProcess._fields} for each in ranks]
        write_json(self.path / RANKS, {"ranks": rows})

    def ranks(self) -> list[RankProcess]:
        """What `record_ranks` has recorded; empty if nothing, or if it cannot be read."""
        with suppress(TypeError):
            rows = files.read_json(self.path / RANKS).get("ranks") or []
            return [RankProcess(**row) for row in rows]
        return []

    def record_error(
        self, rank: int, kind: str, message: str, trace: str, exit_code: int = 1, **more: object
    ) -> bool:
        """Records a rank's own failure: torchrun, mpirun and srun lose exit codes and messages."""
        return failures.record(self.errors, rank, kind, message, trace, exit_code, **more)

    def first_error(self) -> dict[str, Any] | None:
        """The failure that caused the others, see `distdl.runs.failures`."""
        return failures.first(self.errors)


def _ended(state: JobState) -> dict[str, Any]:
    return {"state": state, "ended": time.time(), "exit_code": state.exit_code}
