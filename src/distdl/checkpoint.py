"""Durable checkpoints: a checkpoint exists when its manifest does.

Rename is not atomic on Blob or blobfuse. So the file is written first, then a manifest with its
size and sha256; without an intact manifest a checkpoint is never opened. `last.ckpt` and
`best.ckpt` are hard links (copies where links do not exist) with manifests of their own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distdl.errors import Problem, UserError
from distdl.run_directory import read_json, write_json

log = logging.getLogger(__name__)

SUFFIX = ".manifest.json"
ALIASES = ("last.ckpt", "best.ckpt")


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run, in one folder."""

    folder: Path

    def temporary(self, name: str) -> Path:
        """Where to write `name` before it is published."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f".{name}.tmp"

    def publish(self, name: str, **facts: Any) -> Path:
        """Makes the temporary file of `name` a checkpoint: sync, rename, manifest last."""
        temporary, path = self.temporary(name), self.folder / name
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        entry = {"size": temporary.stat().st_size, "sha256": sha256(temporary)}
        manifest = {"files": {name: entry}, "created": time.time(), **facts}
        # A replay after a crash may reach the same step again: the old manifest goes first.
        manifest_of(path).unlink(missing_ok=True)
        os.replace(temporary, path)
        write_json(manifest_of(path), manifest)
        return path

    def alias(self, alias: str, path: Path) -> None:
        """Makes `last.ckpt` or `best.ckpt` mean `path`."""
        temporary, target = self.temporary(alias), self.folder / alias
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
        manifest = read_json(manifest_of(path))
        manifest["files"] = {alias: manifest["files"][path.name]}
        manifest["alias_of"] = path.name
        manifest_of(target).unlink(missing_ok=True)
        os.replace(temporary, target)
        write_json(manifest_of(target), manifest)

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep`; what best.ckpt links to lives on in it."""
        for path in self.all()[keep:]:
            manifest_of(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)

    def all(self) -> list[Path]:
        """Checkpoints that have a manifest, the newest (by step, then by time) first."""
        found = []
        for manifest_path in self.folder.glob(f"*{SUFFIX}"):
            path = manifest_path.with_name(manifest_path.name.removesuffix(SUFFIX))
            if path.name not in ALIASES:
                manifest = read_json(manifest_path)
                found.append(((manifest.get("step", -1), manifest.get("created", 0)), path))
        return [path for _, path in sorted(found, reverse=True)]

    def newest(self) -> Path | None:
        """The newest intact checkpoint; damaged ones are skipped with a warning."""
        # Without a readable manifest nobody knows how new one is: those are looked at first.
        for path in sorted(self.all(), key=lambda path: bool(read_json(manifest_of(path)))):
            damage = damage_of(path)
            if damage is None:
                return path
            log.warning("skipped a damaged checkpoint: %s: %s", path, damage)
        return None


def damage_of(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Reads the whole file."""
    manifest = read_json(manifest_of(path))
    if not manifest:
        return "it has no readable manifest"
    for name, entry in manifest["files"].items():
        file = path.with_name(name)
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size"]:
            return f"{name} has {file.stat().st_size} bytes, and {entry['size']} were written"
        if sha256(file) != entry["sha256"]:
            return f"{name} is not what was written (sha256 differs)"
    return None


def find(named: str | Path) -> Path:
    """A checkpoint as a user names it: a file, or a run directory (its newest).

    Raises:
        UserError: There is none, or it is damaged.
    """
    path = Path(named)
    if (path / "checkpoints").is_dir():
        newest = CheckpointStore(path / "checkpoints").newest()
        if newest is None:
            raise UserError(Problem(str(named), "this run has no intact checkpoint"))
        return newest
    if not path.is_file():
        raise UserError(
            Problem(str(named), "no such checkpoint", "name a .ckpt file or a run directory")
        )
    # A file from elsewhere has no manifest, and that is no damage.
    if manifest_of(path).exists() and (damage := damage_of(path)):
        raise UserError(Problem(str(named), f"this checkpoint is damaged: {damage}"))
    return path


def manifest_of(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
