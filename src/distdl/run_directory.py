"""A run's directory: the frozen config once, a folder for each attempt, and what they leave.

    outputs/<experiment>/<name>/
        config.yaml         the recipe, frozen
        provenance.json     commit, command, packages
        attempts/001/       launch.yaml, status.json, errors/, logs/
        checkpoints/  logs/  tracking/

How its files are written and read: `distdl.run_files`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl import failures, run_files
from distdl.errors import Problem, UserError
from distdl.job import JobState, Resources
from distdl.processes import is_alive, this_process
from distdl.run_files import Damaged, write_json, write_text
from distdl.run_files import read_json as read_json
from distdl.run_files import sync as sync

CONFIG, PROVENANCE = "config.yaml", "provenance.json"
LAUNCH, STATUS = "launch.yaml", "status.json"
NUMBER = (int, float)
STATUS_SHAPE: run_files.Shape = {
    "state": str,
    "host": str,
    "pid": int,
    "birth": str,
    "started": NUMBER,
    "ended": NUMBER,
    "exit_code": int,
    "restarts": int,
    "error": str,
    "metrics": dict,
    "parameters": dict,
}
PROVENANCE_SHAPE: run_files.Shape = {"config_sha256": str, "git": dict, "command": (list, str)}
LAUNCH_SHAPE: run_files.Shape = {"run_id": str, "where": dict}
# Of one that carries no checksum: it was frozen before there was any.
RECIPE_SHAPE: run_files.Shape = {"model": dict, "trainer": dict, "callbacks": object}


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
        """Where it runs: `where`, `resources`, `changes`, `global_batch_size`.

        Raises:
            Damaged: The file is absent, cut, changed, or of another shape.
        """
        return run_files.load_yaml(self.path / LAUNCH, LAUNCH_SHAPE, self._put_aside())

    @property
    def task(self) -> str:
        """What `task._target_` names.

        Raises:
            Damaged: launch.yaml does not say.
        """
        return str(((self.launch().get("where") or {}).get("task") or {}).get("_target_"))

    def check_launch(self) -> None:
        """Whether `launch` can be read.

        Raises:
            Damaged: It cannot.
        """
        run_files.check_yaml(self.path / LAUNCH, LAUNCH_SHAPE, self._put_aside())

    def _put_aside(self) -> str:
        aside, run = self.path.with_name(f"damaged-{self.path.name}"), self.path.parents[1]
        return (
            "restore it, or, once no process of this attempt runs any more, put it aside and go "
            f"on: mv {self.path} {aside} && python -m distdl resume {run}"
        )

    def write_launch(self, record: dict[str, Any]) -> None:
        text = OmegaConf.to_yaml(OmegaConf.create(record))
        run_files.write_stamped(self.path / LAUNCH, text)

    def resources(self) -> Resources:
        """How large it is.

        Raises:
            Damaged: launch.yaml does not say.
        """
        size = dict(self.launch().get("resources") or {})
        ids = size.pop("device_ids", None)
        try:
            return Resources(**size, device_ids=tuple(map(str, ids)) if ids else None)
        except TypeError:
            what = f"resources is {size}"
            raise Damaged(self.path / LAUNCH, what, "restore it") from None

    def status(self) -> dict[str, Any]:
        """What status.json says, empty if there is none.

        Raises:
            Damaged: The file is cut, of another shape, or of a state that does not exist.
        """
        path = self.path / STATUS
        remedy = f"make sure that no process of this attempt runs any more, and then: rm {path}"
        found = run_files.load_json(path, STATUS_SHAPE, remedy)
        if found.get("state") is not None and found["state"] not in list(JobState):
            raise Damaged(path, f"state is {found['state'][:40]!r}", remedy)
        for name, value in (found.get("metrics") or {}).items():
            if not isinstance(value, NUMBER):
                raise Damaged(path, f"metrics.{name} is {str(value)[:40]!r}", remedy)
        return found

    def recorded(self) -> JobState:
        """The state on record, believed as it is."""
        return JobState(self.status().get("state") or "UNKNOWN")

    def state(self) -> JobState:
        """The state on record; one that waits or runs and whose process is gone from this host has
        failed.

        That of a job which lives elsewhere is for `distdl.jobs` to say.
        """
        recorded = self.recorded()
        waits = recorded in (JobState.PENDING, JobState.RUNNING)
        return JobState.FAILED if waits and not self.job() and self._is_gone() else recorded

    def is_under_way(self) -> bool:
        """Whether it runs, or is being started, as far as can be known from here. (A job that
        waits somewhere is for `distdl.jobs` to say.)"""
        state = self.state()
        if state is JobState.PENDING:
            return not self.is_mine() and not self.job()
        return state is JobState.RUNNING

    def is_mine(self) -> bool:
        """Whether this very process is starting it, and nobody has taken it over yet."""
        status, here = self.status(), this_process()
        same = all(status.get(key) == value for key, value in here.items())
        return same and self.recorded() is JobState.PENDING and not self.job()

    def _is_of_this_host(self) -> bool:
        return self.status().get("host") == socket.gethostname()

    def _is_gone(self) -> bool:
        """Whether the process on record was one of this host and has ended."""
        status = self.status()
        pid = status.get("pid") or 0
        return self._is_of_this_host() and not is_alive(pid, status.get("birth"))

    def job(self) -> dict[str, Any]:
        """The job that a launcher submitted for this attempt: `handle`, `url`; empty if none.

        Raises:
            Damaged: The file is cut or of another shape.
        """
        path = self.path / "job.json"
        remedy = "write the job's handle into it again: " + '{"handle": "slurm://123", "url": null}'
        found = run_files.load_json(path, {"handle": str, "url": str}, remedy)
        if path.exists() and not found.get("handle"):
            raise Damaged(path, "it names no handle", remedy)
        return found

    def update(self, **fields: Any) -> None:
        """Merges `fields` into status.json. A damaged one is kept beside it, and begun anew: that a
        run goes on is worth more than what a file said before."""
        write_json(self.path / STATUS, {**self._whole_status(), **fields})

    def _whole_status(self) -> dict[str, Any]:
        path = self.path / STATUS
        try:
            return self.status()
        except Damaged:
            os.replace(path, path.with_name(f"{path.name}.damaged"))
            return {}

    def begin(self) -> None:
        """Rank 0 is here. Of an attempt that its scheduler started again, what went wrong before
        is kept apart."""
        restarts = self._whole_status().get("restarts")
        restarts = 0 if restarts is None else restarts + 1
        if restarts and (self.path / "errors").is_dir():
            os.replace(self.path / "errors", self.path / f"errors-{restarts:03d}")
        self.update(
            state=JobState.RUNNING,
            started=time.time(),
            ended=None,
            **this_process(),
            error=None,
            restarts=restarts,
        )

    def end(self, state: JobState, **fields: Any) -> None:
        self.update(state=state, ended=time.time(), exit_code=state.exit_code, **fields)

    def conclude(self, place: JobState, code: int | None = None, killed: str = "") -> JobState:
        """The job has ended: puts on record what the run did not say itself.

        Args:
            place: How it ended as its place knows it.
            code: The exit code, where one process stands for the job.
            killed: What ended the job from outside, in a sentence; the signals that its ranks got
                by that are no preemption.
        """
        recorded = JobState(self._whole_status().get("state") or "UNKNOWN")
        first = self.first_error()
        agreed = place in (JobState.CANCELLED, JobState.PREEMPTED)
        if killed and recorded is not JobState.SUCCEEDED and (not first or first.get("lost_peer")):
            self.end(JobState.FAILED, error=killed)
        elif first:  # whatever rank 0 made of it
            error = f"rank {first['rank']}: {failures.told(first)}"
            self.end(JobState.FAILED, error=error, first_error=failures.facts(first))
            code = first.get("exit_code", code)
        elif recorded.ended and (agreed or not code or recorded is not JobState.SUCCEEDED):
            # A scheduler's cancel and its preemption are the same signal to a worker.
            if recorded is JobState.PREEMPTED and place is JobState.CANCELLED:
                self.update(state=place, exit_code=place.exit_code)
        elif recorded is JobState.PENDING and place is JobState.SUCCEEDED and not code:
            self.end(place)  # its store is elsewhere
        else:
            said = f"a worker ended with exit code {code}" if code else "it ended without a word"
            if agreed:
                said = "it was told to end, and its ranks did so before they could say it"
            self.end(place if agreed else JobState.FAILED, error=said)
        state = self.recorded()
        if state is JobState.FAILED and code is not None and code > 0:
            self.update(exit_code=code)
        self.update(concluded=True)
        return state

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    def record_error(
        self, rank: int, kind: str, message: str, trace: str, exit_code: int = 1, **more: Any
    ) -> bool:
        """A rank's own failure: torchrun, mpirun and srun swallow exit codes and messages."""
        return failures.record(self.errors, rank, kind, message, trace, exit_code, **more)

    def first_error(self) -> dict[str, Any] | None:
        """The failure of a rank from which the others follow, see `distdl.failures`."""
        return failures.first(self.errors)


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
        """Lays the run down. `config.yaml` comes last: with it, the run exists. Its checksum stands
        beside it, since it is byte for byte the same wherever the run runs."""
        self.path.mkdir(parents=True, exist_ok=True)
        stamped = {**provenance, "config_sha256": run_files.digest(recipe)}
        write_json(self.path / PROVENANCE, stamped)
        write_text(self.path / CONFIG, recipe)

    def take_back(self) -> None:
        """Undoes `create`, as long as there is no attempt. What else lies in the folder stays.

        Raises:
            OSError: There is an attempt, or it cannot be undone.
        """
        if (self.path / "attempts").exists():
            (self.path / "attempts").rmdir()
        (self.path / CONFIG).unlink(missing_ok=True)
        (self.path / PROVENANCE).unlink(missing_ok=True)
        self.path.rmdir()

    def spare_path(self) -> Path:
        """Where it can be kept under another name: `<name>.failed-1`, or the first that is free."""
        paths = (self.path.with_name(f"{self.path.name}.failed-{n}") for n in itertools.count(1))
        return next(path for path in paths if not path.exists())

    def recipe(self) -> DictConfig:
        """The frozen config.

        Raises:
            Damaged: It is cut, or is not what was frozen.
        """
        return OmegaConf.create(run_files.load_yaml(*self._config()))

    def check_config(self) -> None:
        """Whether `recipe` can be read; cheap where it has a checksum.

        Raises:
            Damaged: It cannot, or provenance.json, which holds the checksum, cannot.
        """
        run_files.check_yaml(*self._config())

    def _config(self) -> tuple[Path, run_files.Shape, str, str | None]:
        remedy = "restore it, or start a new run from its weights: checkpoint.resume_from="
        sha256 = self.provenance().get("config_sha256")
        return self.path / CONFIG, {} if sha256 else RECIPE_SHAPE, f"{remedy}{self.path}", sha256

    def provenance(self) -> dict[str, Any]:
        """Where it came from; empty if there is no provenance.json of its own (a link is none).

        Raises:
            Damaged: It is cut, or of another shape.
        """
        path = self.path / PROVENANCE
        if path.is_symlink():
            return {}
        remedy = (
            "restore it, or, if config.yaml is as it was (only this file can tell), put it aside: "
            f"mv {path} {path}.damaged"
        )
        return run_files.load_json(path, PROVENANCE_SHAPE, remedy)

    def attempts(self) -> list[Attempt]:
        own = (a for a in self._folders() if not a.path.is_symlink())  # a link: another run's
        return [a for a in own if (a.path / LAUNCH).exists()]

    def _folders(self) -> list[Attempt]:
        """Also those of which nothing is left but the folder."""
        folders = [f for f in (self.path / "attempts").glob("[0-9]*") if f.name.isdigit()]
        return [Attempt(f) for f in sorted(folders, key=lambda f: int(f.name))]

    def last_attempt(self) -> Attempt | None:
        return (self.attempts() or [None])[-1]  # type: ignore[list-item]

    def main_attempt(self) -> Attempt | None:
        """The newest that does what the run was started for; a test of it is an errand.

        Raises:
            Damaged: A launch.yaml does not say what.
        """
        attempts = self.attempts()
        if len(attempts) < 2:
            return attempts[0] if attempts else None
        task = attempts[0].task
        return next(each for each in reversed(attempts) if each.task == task)

    def refuse_under_way(self) -> None:
        """
        Raises:
            UserError: An attempt of this run is running.
        """
        last = self.last_attempt()
        if last is not None and last.is_under_way():
            raise UserError(refusal(self, last))

    def begin_attempt(
        self, launch: dict[str, Any], check: Callable[[], None] = lambda: None
    ) -> Attempt:
        """The next attempt. It appears with all that says who starts it, in one rename that only
        one of several starts can make: whoever comes second finds it there, and looks again.

        Args:
            launch: For launch.yaml.
            check: Refuses the start for further reasons; called before each try.

        Raises:
            UserError: An attempt of this run is running.
        """
        made = self.path / "attempts" / f".{socket.gethostname()}.{os.getpid()}"
        try:
            while True:
                folders = self._folders()
                check()
                self.refuse_under_way()
                Attempt(made).write_launch(launch)
                new = {"state": JobState.PENDING, "started": time.time(), **this_process()}
                write_json(made / STATUS, new)
                path = made.with_name(f"{folders[-1].number + 1 if folders else 1:03d}")
                try:
                    os.rename(made, path)
                    return Attempt(path)
                except OSError:
                    if not path.exists():
                        raise
        finally:
            shutil.rmtree(made, ignore_errors=True)


def refusal(run: RunDirectory, last: Attempt) -> Problem:
    status = last.status()
    remedy = "wait for it, stop it, or start a run with another name"
    if status.get("host") != socket.gethostname() or last.job():
        remedy += f"; if it is gone: rm {last.path / STATUS}"
    who = f"pid {status.get('pid')} on {status.get('host')}"
    since = time.ctime(status.get("started") or 0)
    what = f"attempt {last.number} is running ({who}, started {since})"
    return Problem(str(run.path), what, remedy)


def shown(path: Path) -> str:
    """Short, as a person would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
