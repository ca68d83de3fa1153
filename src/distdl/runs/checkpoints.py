"""Durable checkpoints: a checkpoint exists if its manifest exists.

Renaming is not atomic on Blob or blobfuse. Therefore the file (or a folder of files, if every rank
writes its slices) is written first, then a manifest with sizes and sha256. A checkpoint without an
intact manifest is never opened. `last.ckpt` and `best.ckpt` are hard links (copies where links do
not exist) with their own manifests; see `BETWEEN_STEPS` for a `best.ckpt` of its own.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from distdl.config import published
from distdl.runs.directory import read_json, sync, write_json
from distdl.runs.project import is_run
from distdl.util.digests import sha256_of
from distdl.util.errors import UserError
from distdl.util.strict_json import numbers

log = logging.getLogger(__name__)

SUFFIX = ".manifest.json"
ALIASES = ("last.ckpt", "best.ckpt")
# In the manifest of a best.ckpt that is no other checkpoint's alias: it was saved between batches
# whose gradients are accumulated, and has none of them.
BETWEEN_STEPS = "between_steps"


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run, in one folder."""

    folder: Path

    def temporary(self, name: str) -> Path:
        """The path to write `name` to before it is published."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f".{name}.tmp"

    def publish(self, name: str, **facts: object) -> Path:
        """Makes `temporary(name)` a checkpoint: sync, then rename, then the manifest."""
        temporary = self.temporary(name)
        files = {
            (PurePath(name) / written.relative_to(temporary)).as_posix(): {
                "size": written.stat().st_size,
                "sha256": sha256_of(written),
            }
            for written in sorted(filter(Path.is_file, parts_of(temporary)))
        }
        manifest = {"files": files, "created": time.time(), **facts}
        self._put(temporary, self.folder / name, manifest)
        return self.folder / name

    def _put(self, temporary: Path, path: Path, manifest: dict[str, Any]) -> None:
        """Gives a checkpoint its name and its manifest; both are on the disk when this returns."""
        for part in parts_of(temporary):
            sync(part)
        # Written before the rename, so that a kill rarely leaves a checkpoint without a manifest.
        ready = self.temporary(manifest_of(path).name)
        write_json(ready, manifest, durable=True)
        # After a crash the same step may be reached again, so the old manifest is removed first.
        manifest_of(path).unlink(missing_ok=True)
        replace(temporary, path)
        os.replace(ready, manifest_of(path))
        for folder in (self.folder, self.folder.parent):  # the folder may be new
            sync(folder)

    def alias(self, alias: str, path: Path) -> None:
        """Makes `last.ckpt` or `best.ckpt` refer to `path`."""
        temporary = self.temporary(alias)
        remove(temporary)
        if path.is_dir():
            shutil.copytree(path, temporary, copy_function=link)
        else:
            link(path, temporary)
        manifest = read_json(manifest_of(path))
        files = manifest["files"].items()
        manifest["files"] = {alias + name.removeprefix(path.name): entry for name, entry in files}
        manifest["alias_of"] = path.name
        self._put(temporary, self.folder / alias, manifest)

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep` checkpoints (best.ckpt keeps the file that it links
        to). Also removes half-written files of a killed process: nothing is being written now."""
        for path in self.all()[keep:]:
            remove(path)
            manifest_of(path).unlink(missing_ok=True)
        # A manifest is itself written under a temporary name first: `.x.manifest.json.tmp.*.part`.
        for left in (*self.folder.glob(".*.ckpt.tmp"), *self.folder.glob(f".*{SUFFIX}.tmp*")):
            remove(left)

    def clear(self) -> int:
        """Removes all checkpoints, and what a killed process has left of them; files of others
        stay. Returns how many bytes that has freed: what is linked elsewhere, too, is still there.
        """
        before = self._own_files()
        self.prune(0)
        for alias in ALIASES:
            if manifest_of(self.folder / alias).exists():
                remove(self.folder / alias)
                manifest_of(self.folder / alias).unlink()
        after = self._own_files()
        return sum(size for file, size in before.items() if file not in after)

    def _own_files(self) -> dict[tuple[int, int], int]:
        """Device and inode to size, of the files all of whose names are in this folder."""
        found = [path.lstat() for path in self.folder.rglob("*") if path.is_file()]
        names = Counter((each.st_dev, each.st_ino) for each in found)
        return {
            (each.st_dev, each.st_ino): each.st_size
            for each in found
            if names[each.st_dev, each.st_ino] == each.st_nlink
        }

    def all(self) -> list[Path]:
        """Checkpoints that have a manifest, sorted by step, then by time, the newest first."""
        manifests = self.folder.glob(f"*{SUFFIX}")
        paths = (path.with_name(path.name.removesuffix(SUFFIX)) for path in manifests)
        return sorted((p for p in paths if p.name not in ALIASES), key=age, reverse=True)

    def newest(self) -> Path | None:
        """The newest intact checkpoint to resume from, also an alias; None if there is no
        checkpoint of any kind. Damaged ones and those without a manifest are skipped with a
        warning; a best.ckpt from between two steps (`BETWEEN_STEPS`) is passed over.

        Raises:
            UserError: There are checkpoints, and each of them is damaged.
        """
        paths = {*self.all(), *self.folder.glob("[!.]*.ckpt")}
        paths = {path for path in paths if not manifest_at(path).get(BETWEEN_STEPS)}
        damaged = {}
        # A checkpoint without a readable manifest has no known age, and is tried first.
        for path in sorted(paths, key=lambda p: (not manifest_at(p), age(p)), reverse=True):
            if (damage := damage_of(path)) is None:
                return path
            damaged[path.name] = damage
            log.warning("skipped a damaged checkpoint: %s: %s", path, damage)
        if damaged:
            each = "".join(f"\n    {name}: {damage}" for name, damage in damaged.items())
            raise UserError.at(
                str(self.folder),
                what=(
                    "all checkpoints of this run are damaged, "
                    f"and it would start from step 0:{each}"
                ),
                remedy=f"to start again: another name=, or mv {self.folder} {self.folder}.damaged",
                code="damaged-file",
            )
        return None


def manifest_at(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest; empty if it is absent, incomplete or of another shape."""
    manifest = read_json(manifest_of(path))
    files = manifest.get("files")
    if not files or not isinstance(files, dict):
        return {}
    entries = files.values()
    readable = all(isinstance(e, dict) and {"size", "sha256"} <= e.keys() for e in entries)
    if not readable:
        return {}
    metrics = manifest.get("metrics")
    return {**manifest, "metrics": numbers(metrics)} if isinstance(metrics, dict) else manifest


class Judged(NamedTuple):
    """The metric by which a run's best.ckpt is chosen, and "max" or "min"."""

    monitor: str | None
    mode: str


def judged_by(folder: Path, monitor: str | None, mode: str) -> Judged:
    """What the manifest of the best.ckpt in `folder` says. If the user chose no metric, it is the
    main one of the module's domain, which a config does not know.

    Args:
        monitor, mode: Of the run's config, for a run without a best.ckpt, and for one of an older
            distdl.
    """
    manifest = manifest_at(folder / "best.ckpt")
    named = manifest.get("monitor")
    direction = manifest.get("mode")
    if isinstance(named, str) and direction in ("max", "min"):
        return Judged(named, direction)
    return Judged(monitor, mode)


def age(path: Path) -> tuple[float, float, bool]:
    """Sorts checkpoints by step, then by time; an alias sorts below its checkpoint."""
    values = (manifest_at(path).get(key) for key in ("step", "created"))
    step, created = (value if isinstance(value, int | float) else -1.0 for value in values)
    return step, created, path.name not in ALIASES


def damage_of(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Reads the whole file."""
    manifest = manifest_at(path)
    if not manifest_of(path).exists():
        return "it has no manifest: it was not written to the end, or another program wrote it"
    if not manifest:
        return "it has no readable manifest"
    for name, entry in manifest["files"].items():
        file = path.parent / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size"]:
            return f"{name} has {file.stat().st_size} bytes, and {entry['size']} were written"
        if sha256_of(file) != entry["sha256"]:
            return f"{name} is not what was written (sha256 differs)"
    return None


def find(named: str | Path, key: str = "", folder: Path | None = None) -> Path:
    """Finds a checkpoint named by the user: a file, the folder of a sharded one, or a run (its
    newest). Raises a UserError if there is none, or it is damaged.

    Args:
        key: The config key with which the user named it.
        folder: The folder in which "best" and "last" are looked up.
    """
    path = Path(named)
    where = f"{key}={named}" if key else str(named)
    forms = "name a .ckpt file or a run directory"
    if path == Path():
        raise UserError.at(where, what="names no checkpoint", remedy=forms, code="wrong-kind")
    if folder and f"{named}.ckpt" in ALIASES:
        path = folder / f"{named}.ckpt"
        if not path.exists():
            other = f"{key}=last, " if (folder / "last.ckpt").exists() else ""
            raise UserError.at(
                where,
                what=f"this run has no {named}.ckpt",
                remedy=f"{other}the name= of a run that has one, a .ckpt file, or a run directory",
                code="incomplete",
            )
    if (path / "checkpoints").is_dir():
        newest = CheckpointStore(path / "checkpoints").newest()
        if newest is None:
            raise UserError.at(where, what="this run has no checkpoint", code="incomplete")
        return newest
    if not path.exists():
        raise UserError.at(where, what="no such checkpoint", remedy=forms, code="not-found")
    # A file from another program has no manifest, and is not damaged by that.
    if path.name and manifest_of(path).exists():
        if damage := damage_of(path):
            raise UserError.at(
                where, what=f"this checkpoint is damaged: {damage}", code="damaged-file"
            )
    elif not looks_like_one(path):
        raise UserError.at(
            where,
            what="is not a checkpoint, or an incomplete one",
            remedy=(
                "name a file that Lightning, torch.save or safetensors wrote, or a run directory"
            ),
            code="damaged-file",
        )
    return path


def looks_like_one(path: Path) -> bool:
    """Whether a file looks complete and like a checkpoint, or a folder may hold a sharded one.
    Nothing is unpickled."""
    if path.is_dir():
        known = (".metadata", "latest", "*/*_model_states.pt")  # FSDP's and DeepSpeed's
        return any(any(path.glob(pattern)) for pattern in known)
    with path.open("rb") as file:
        head = file.read(9)
    if path.suffix == ".safetensors":
        return head[8:] == b"{"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    return head[:1] == b"\x80"  # torch.save before 1.6, a bare pickle


def parts_of(path: Path) -> list[Path]:
    """A checkpoint's files and folders, the inner ones first."""
    return [*sorted(path.rglob("*"), reverse=True), path]


def link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace(source: Path, target: Path) -> None:
    """Renames a file or folder, also over an existing folder, which os.replace alone cannot do."""
    if source.is_dir() or target.is_dir():
        remove(target)
    os.replace(source, target)


def manifest_of(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def best_or_last(folder: Path) -> Path:
    """Which checkpoint of a run is meant if none is named."""
    path = folder / "best.ckpt"
    return path if path.exists() else folder / "last.ckpt"


def located(named: str | Path) -> Path:
    """The file that `model.weights` names: of a run's directory best.ckpt, or else last.ckpt.

    Raises:
        UserError: There is none.
    """
    path = Path(named)
    file = best_or_last(path / "checkpoints") if is_run(path) else path
    if not file.exists():
        raise UserError.at(
            published.KEY,
            what=f"no such file: {named}" if file == path else f"{named} has no checkpoint",
            remedy=published.instead_of(named),
            code="not-found",
        )
    return file


def identity(path: Path) -> str:
    """Names a checkpoint by the sha256 of its files: `last` and `best` may be others later."""
    files = manifest_at(path).get("files") or {}
    if not files and path.is_dir():
        return str(path)
    return "+".join(each["sha256"] for each in files.values()) or sha256_of(path)
