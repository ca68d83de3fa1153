"""What a worker reads: the frozen config and, for a job that leaves this machine, all code.

    attempts/NNN/bundle/
        config.yaml         the recipe, byte for byte the run's
        launch.yaml         where and how large this attempt is
        provenance.json
        code/distdl/        distdl as it was imported here
        code/project/       the user's own code, see `distdl.snapshot`

A bundle is complete: the folder, copied or uploaded anywhere, is the run. On this machine the run's
directory is the bundle, and the code is what is imported.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl.errors import Problem, UserError
from distdl.run_directory import CONFIG, LAUNCH, PROVENANCE, Attempt, RunDirectory
from distdl.run_files import write_stamped, write_text
from distdl.snapshot import Snapshot

# What only the submitter's machine knows.
NOT_SENT = (("where", "output_dir"), ("where", "project", "root"))


@dataclass(frozen=True)
class Bundle:
    path: Path

    @classmethod
    def write(cls, run: RunDirectory, attempt: Attempt, snapshot: Snapshot) -> Bundle:
        """Copies all that an attempt needs into one folder.

        Raises:
            UserError: A file is no longer what was searched for secrets.
        """
        bundle = cls(attempt.path / "bundle")
        for source, name in snapshot.files:
            target = bundle.code / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
            snapshot.refuse_changed(source, name)
        launch = attempt.launch()
        for *parents, key in NOT_SENT:
            node = launch
            for part in parents:
                node = node.get(part) or {}
            node.pop(key, None)
        write_stamped(bundle.path / LAUNCH, OmegaConf.to_yaml(OmegaConf.create(launch)))
        for name in (PROVENANCE, CONFIG):
            shutil.copyfile(run.path / name, bundle.path / name)
        return bundle

    @property
    def code(self) -> Path:
        return self.path / "code"

    def recipe(self) -> DictConfig:
        return RunDirectory(self.path).recipe()

    def python_path(self, launch: dict[str, Any]) -> list[str]:
        """Where the user's modules are: in the bundle, or where he wrote them."""
        root = self.code / "project"
        if not root.is_dir():
            root = Path((launch["where"].get("project") or {}).get("root") or ".")
        return [str((root / folder).absolute()) for folder in launch.get("python_path", ["."])]

    def lay_down(self, run: RunDirectory, number: int) -> Attempt:
        """Makes the store a run with this attempt, where it is not one yet; safe on every rank.

        Raises:
            UserError: The store belongs to another run.
        """
        attempt = Attempt(run.path / "attempts" / f"{number:03d}")
        if self.path.resolve() == run.path.resolve():
            return attempt
        recipe = (self.path / CONFIG).read_bytes()
        if run.exists and (run.path / CONFIG).read_bytes() != recipe:
            raise UserError(
                Problem(str(run.path), "belongs to another run: its config.yaml differs")
            )
        for name in (PROVENANCE, CONFIG):  # config.yaml last: with it, the run exists
            if not (run.path / name).exists():
                write_text(run.path / name, (self.path / name).read_text())
        if not (attempt.path / LAUNCH).exists():
            write_text(attempt.path / LAUNCH, (self.path / LAUNCH).read_text())
        return attempt
