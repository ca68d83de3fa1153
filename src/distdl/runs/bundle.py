"""What a worker reads: the frozen config and, for a job that leaves this machine, all code.

    attempts/NNN/bundle/
        config.yaml         the recipe, byte for byte the run's
        launch.yaml         where this attempt runs, and on how many devices
        provenance.json
        inputs/             fetched weights, if the config names them
        code/distdl/        distdl as it was imported here
        code/project/       the user's own code, see `distdl.runs.snapshot`

The run can start from a copy of the folder anywhere. On this machine, the run's directory is the
bundle, and the code is used where it is imported from.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl.config.recipe import to_yaml
from distdl.runs import inputs
from distdl.runs.directory import CONFIG, LAUNCH, PROVENANCE, Attempt, RunDirectory
from distdl.runs.files import write_stamped, write_text
from distdl.runs.snapshot import Snapshot
from distdl.util.errors import UserError


@dataclass(frozen=True)
class Bundle:
    path: Path

    @classmethod
    def write(cls, run: RunDirectory, attempt: Attempt, snapshot: Snapshot) -> Bundle:
        """Copies everything that an attempt needs into one folder. Raises a UserError if a file has
        changed since it was searched for secrets."""
        bundle = cls(attempt.path / "bundle")
        for source, name in snapshot.files:
            target = bundle.code / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
            snapshot.refuse_changed(source, name)
        launch = attempt.launch()
        where = launch.get("where") or {}
        where.pop("output_dir", None)  # known only on the machine that submits
        (where.get("project") or {}).pop("root", None)
        write_stamped(bundle.path / LAUNCH, to_yaml(OmegaConf.create(launch)))
        for name in (PROVENANCE, CONFIG):
            shutil.copyfile(run.path / name, bundle.path / name)
        inputs.carry(run.provenance(), run.path, bundle.path)
        return bundle

    @property
    def code(self) -> Path:
        return self.path / "code"

    def recipe(self) -> DictConfig:
        return RunDirectory(self.path).recipe()

    def project(self, launch: dict[str, Any]) -> Path:
        """The root of the user's project: its copy in the bundle, or the original."""
        root = self.code / "project"
        if not root.is_dir():
            root = Path((launch["where"].get("project") or {}).get("root") or ".")
        return root.absolute()

    def python_path(self, launch: dict[str, Any]) -> list[str]:
        """Where the user's modules are: in the bundle, or in their original folders."""
        root = self.project(launch)
        return [str((root / folder).absolute()) for folder in launch.get("python_path", ["."])]

    def create_store(self, run: RunDirectory, number: int) -> Attempt:
        """Writes the run and this attempt into the store if they are not there yet; safe on every
        rank. Raises a UserError if the store belongs to another run, or a later attempt of this run
        has begun there (of one that was wrongly held for dead)."""
        attempt = Attempt(run.path / "attempts" / f"{number:03d}")
        last = run.last_attempt()
        if last is not None and last.number > number:
            raise UserError.at(
                str(run.path),
                what=f"attempt {number} does not start, since attempt {last.number} has taken over",
                code="under-way",
            )
        if self.path.resolve() == run.path.resolve():
            return attempt
        recipe = (self.path / CONFIG).read_bytes()
        if run.exists and (run.path / CONFIG).read_bytes() != recipe:
            raise UserError.at(
                str(run.path),
                what="belongs to another run: its config.yaml differs",
                code="mismatch",
            )
        targets = [run.path / PROVENANCE, run.path / CONFIG]  # config.yaml makes the run exist
        for target in (*targets, attempt.path / LAUNCH):
            if not target.exists():
                write_text(target, (self.path / target.name).read_text())
        return attempt
