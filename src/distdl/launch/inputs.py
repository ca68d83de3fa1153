"""Fetches the weights that a config names, before anything starts, on the machine that submits."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig

from distdl.config import published
from distdl.runs.directory import RunDirectory
from distdl.runs.inputs import FOLDER, StoredInput, sha256_in, stored
from distdl.util.errors import UserError
from distdl.util.redact import redact


def provide(config: DictConfig, run: RunDirectory | None) -> list[StoredInput]:
    """The files that a config names: those of the run if it has them, else fetched.

    Args:
        run: None: a new one, also where a failed one of its name makes room.

    Raises:
        UserError: A file cannot be fetched, is damaged, or is another one than the run began with.
    """
    name = published.name_in(config)
    if name is None:
        return []
    if run is None or not run.exists:
        return [fetch(name)]
    record = run.provenance()
    if kept := stored(record, run.path, published.KEY, name):
        return [kept]
    found = fetch(name)
    began = sha256_in(record, published.KEY)
    if began and began != found.sha256:
        what = f"{name} is another file now than the run began with (SHA-256 {began[:12]}...)"
        remedy = f"put that file back into {run.path / FOLDER}, or start a new run"
        raise UserError.at(published.KEY, what, remedy, code="mismatch")
    return [found]


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
        what = f"fetching {name} ended Python (exit code {child.returncode})"
        raise UserError.at(published.KEY, what, "model.weights=FILE", code="failed") from None
    if refused := answer.get("problem"):
        where, what, remedy, code = (redact(str(text)) for text in refused)
        raise UserError.at(where, what, remedy, code=code)
    path = Path(answer["path"])
    return StoredInput(
        published.KEY, name, path, answer["file"], answer["sha256"], answer["source"]
    )
