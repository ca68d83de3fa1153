"""A run's directory: the frozen config once, a folder for each attempt, and their results.

    outputs/<experiment>/<name>/
        config.yaml         the recipe, frozen
        provenance.json     commit, command, packages
        attempts/001/       launch.yaml, status.json, errors/, logs/
        inputs/             fetched weights, if the config names them
        checkpoints/  logs/  tracking/

`distdl.runs.files` describes how its files are written and read.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl.job import JobState
from distdl.runs import files, inputs
from distdl.runs.attempt import LAUNCH, STATUS, moment, place_of
from distdl.runs.attempt import Attempt as Attempt
from distdl.runs.files import read_json as read_json
from distdl.runs.files import write_json, write_text
from distdl.util.atomic_files import sync as sync
from distdl.util.errors import UserError
from distdl.util.processes import this_process

CONFIG, PROVENANCE = "config.yaml", "provenance.json"
PREDICTING = "_progress.json"  # beside the rows of a prediction that is not complete
# What a validation looks like: in the run, or in the attempt of an evaluation. The file is written
# last, and names the images beside it.
PICTURES = "pictures"
PICTURES_FILE = "pictures.json"
PROVENANCE_SHAPE: files.Shape = {
    "config_sha256": str,
    "git": dict,
    "command": (list, str),
    inputs.RECORD: dict,
}
# For a recipe without a checksum, frozen before checksums were introduced.
RECIPE_SHAPE: files.Shape = {"model": dict, "trainer": dict, "callbacks": object}


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exists(self) -> bool:
        return os.path.isfile(self.path / CONFIG)  # False for a name that is too long

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Opens an existing run. Raises a UserError that names similar runs if there is none."""
        from distdl.runs.records import find_run

        run = cls(find_run(str(path)).resolve())
        if not run.exists:
            raise UserError.at(
                str(path), what="has no config.yaml, so it cannot be resumed", code="incomplete"
            )
        return run

    def create(self, recipe: str, provenance: dict[str, Any]) -> None:
        """Writes a new run. `config.yaml` is written last, since it makes the run exist. Its
        checksum is in provenance.json, so that config.yaml is byte for byte the same everywhere."""
        self.path.mkdir(parents=True, exist_ok=True)
        stamped = {**provenance, "config_sha256": files.digest(recipe)}
        write_json(self.path / PROVENANCE, stamped)
        write_text(self.path / CONFIG, recipe)

    def undo_create(self) -> None:
        """Undoes `create`; other files in the folder stay. Raises an OSError if there is an
        attempt, or it cannot be undone."""
        if (self.path / "attempts").exists():
            (self.path / "attempts").rmdir()
        (self.path / CONFIG).unlink(missing_ok=True)
        (self.path / PROVENANCE).unlink(missing_ok=True)
        inputs.remove(self.path)
        self.path.rmdir()

    def path_when_failed(self) -> Path:
        """A free path to which the run can be renamed: `<name>.failed-1`, or a higher number."""
        paths = (self.path.with_name(f"{self.path.name}.failed-{n}") for n in itertools.count(1))
        return next(path for path in paths if not path.exists())

    def recipe(self) -> DictConfig:
        """The frozen config. Raises `Damaged` if it is not what was frozen."""
        return OmegaConf.create(files.load_yaml(*self._config()))

    def check_config(self) -> None:
        """Raises `Damaged` if `recipe`, or provenance.json with its checksum, cannot be read."""
        files.check_yaml(*self._config())

    def _config(self) -> tuple[Path, files.Shape, str, str | None]:
        remedy = "restore it, or start a new run from its weights: checkpoint.resume_from="
        sha256 = self.provenance().get("config_sha256")
        return self.path / CONFIG, {} if sha256 else RECIPE_SHAPE, f"{remedy}{self.path}", sha256

    def provenance(self) -> dict[str, Any]:
        """Where the run came from; empty if it has no provenance.json of its own (a link does not
        count). Raises `Damaged` if that is truncated, or of another shape."""
        path = self.path / PROVENANCE
        if path.is_symlink():
            return {}
        remedy = (
            "restore it, or, if you know that config.yaml is unchanged (the checksum is in this "
            f"file), move it aside: mv {path} {path}.damaged"
        )
        return files.load_json(path, PROVENANCE_SHAPE, remedy)

    def typed_keys(self, launch: Mapping[str, Any]) -> set[str]:
        """The keys of the recipe that were set on the command line: at the run's start, or at a
        resume up to the attempt of this launch.yaml that changed them."""
        provenance = self.provenance()
        words = (*(provenance.get("overrides") or ()), *(provenance.get("swept") or ()))
        changes = launch.get("changes") or {}
        return {str(word).partition("=")[0].lstrip("+") for word in words} | changes.keys()

    def attempts(self) -> list[Attempt]:
        folders = (a for a in self._folders() if not a.path.is_symlink())  # a link is another run's
        return [a for a in folders if (a.path / LAUNCH).exists()]

    def _folders(self) -> list[Attempt]:
        """Includes attempts of which only the folder is left."""
        folders = [f for f in (self.path / "attempts").glob("[0-9]*") if f.name.isdigit()]
        return [Attempt(f) for f in sorted(folders, key=lambda f: int(f.name))]

    def last_attempt(self) -> Attempt | None:
        return next(reversed(self.attempts()), None)

    def next_attempt(self) -> Attempt:
        """The path of the next attempt; its folder does not exist yet."""
        number = max((folder.number for folder in self._folders()), default=0) + 1
        return Attempt(self.path / "attempts" / f"{number:03d}")

    def main_attempt(self) -> Attempt | None:
        """The newest attempt with the run's original task (a later test of the run has another).
        Raises `Damaged` if a launch.yaml cannot be read."""
        attempts = self.attempts()
        if len(attempts) < 2:
            return attempts[0] if attempts else None
        task = attempts[0].task
        return next(each for each in reversed(attempts) if each.task == task)

    def refuse_under_way(self) -> None:
        """Raises a UserError if an attempt of this run is running."""
        last = self.last_attempt()
        if last is None or not last.is_under_way():
            return
        status = last.status()
        remedy = "wait for it, stop it, or start a run with another name"
        if status.get("host") != socket.gethostname() or last.job():
            remedy += f"; if you know that it is gone: python -m distdl jobs ended {self.path}"
        who = f"pid {status.get('pid')} on {status.get('host')}"
        if started := moment(status.get("started")):
            who += f", started {time.ctime(started)}"
        raise UserError.at(
            str(self.path),
            what=f"attempt {last.number} is running ({who})",
            remedy=remedy,
            code="under-way",
        )

    def begin_attempt(
        self, launch: dict[str, Any], check: Callable[[], None] = lambda: None
    ) -> Attempt:
        """Creates the next attempt. It appears complete, with its launch.yaml (`launch`) and
        status.json, by one rename. Of several starts at once only one can rename; the others then
        find the new attempt and check again.

        Args:
            check: Refuses the start for further reasons; called before each try.

        Raises:
            UserError: An attempt of this run is running.
        """
        prepared = self.path / "attempts" / f".{socket.gethostname()}.{os.getpid()}"
        try:
            while True:
                attempt = self.next_attempt()
                check()
                self.refuse_under_way()
                Attempt(prepared).write_launch(launch)
                new = {"state": JobState.PENDING, "started": time.time(), **this_process()}
                new |= place_of(prepared, attempt.path)
                write_json(prepared / STATUS, new)
                try:
                    os.rename(prepared, attempt.path)
                    return attempt
                except OSError:
                    if not attempt.path.exists():
                        raise
        finally:
            shutil.rmtree(prepared, ignore_errors=True)


def shown(path: Path) -> str:
    """A short path, as a person would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
