"""Fetches the weights that a config names, before anything starts, on the machine that submits, and
keeps those that the run needs again."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from distdl.config import published
from distdl.runs.checkpoints import located
from distdl.runs.directory import RunDirectory
from distdl.runs.inputs import FOLDER, StoredInput, sha256_in, stored
from distdl.util.digests import sha256_of
from distdl.util.errors import UserError
from distdl.util.redact import redact


def provide(config: DictConfig, run: RunDirectory | None) -> list[StoredInput]:
    """The files that a config names: those of the run if it has them, else fetched, or found.

    Args:
        run: None: a new one, also where a failed one of its name makes room.

    Raises:
        UserError: A file cannot be fetched, is damaged, or is another one than the run began with.
    """
    name = published.name_in(config) or beside_adapters(config)
    if name is None:
        return []
    if run is None or not run.exists:
        return _found(name)
    record = run.provenance()
    if kept := stored(record, run.path, published.KEY, name):
        return [kept]
    found = _found(name)
    began = sha256_in(record, published.KEY)
    if began and began not in [each.sha256 for each in found]:
        raise UserError.at(
            published.KEY,
            what=f"{name} is another file now than the run began with (SHA-256 {began[:12]}...)",
            remedy=f"put that file back into {run.path / FOLDER}, or start a new run",
            code="mismatch",
        )
    return found


def _found(name: str) -> list[StoredInput]:
    return [fetch(name)] if published.is_name(name) else found_here(name)


def beside_adapters(config: DictConfig) -> str | None:
    """The value of `model.weights` if the run trains adapters alone: its checkpoints lack these
    weights, which must not become others later, as a run's best.ckpt does. None: it does not."""
    model = config.get("model") or {}
    weights = OmegaConf.select(config, published.KEY, throw_on_resolution_failure=False)
    return str(weights) if model.get("lora") and weights else None


def found_here(named: str) -> list[StoredInput]:
    """The file of a path or of a run's folder; none if it is a folder of several files, or lies
    where this machine does not see it."""
    try:
        path = located(named).resolve()
    except UserError:  # which a run on this machine is told by its model's own checks
        return []
    if not path.is_file():
        return []
    digest = sha256_of(path)
    file = f"{path.stem}-{digest[:8]}{path.suffix}"
    return [StoredInput(published.KEY, named, path, file, digest, str(path))]


@functools.cache
def fetch(name: str) -> StoredInput:
    """The file of a name, from the cache of its publisher's client or from the network, by
    `distdl.models.published` in a process of its own, whose progress bar goes to stderr.

    Raises:
        UserError: It cannot be fetched.
    """
    # -P: timm and torchvision, and no files of the current folder with their names.
    command = [sys.executable, "-P", "-m", "distdl.models.published", name]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        raise UserError.at(
            published.KEY,
            what=f"fetching {name} ended Python (exit code {child.returncode})",
            remedy="model.weights=FILE",
            code="failed",
        ) from None
    if refused := answer.get("problem"):
        where, what, remedy, code = (redact(str(text)) for text in refused)
        raise UserError.at(where, what=what, remedy=remedy, code=code)
    path = Path(answer["path"])
    return StoredInput(
        published.KEY, name, path, answer["file"], answer["sha256"], answer["source"]
    )
