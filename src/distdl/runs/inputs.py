"""Files that a run starts from, kept with it: weights that were fetched by their name, and those
beside which adapters are trained (`model.lora`), without which these say nothing.

    outputs/<experiment>/<name>/inputs/
        resnet50-11ad3fa6.pth

provenance.json says, for each key of the config, what its file is (`StoredInput.record`). A bundle
has the files too, so that no node downloads anything.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl.config import published
from distdl.util.atomic_files import atomic_file
from distdl.util.digests import sha256_of
from distdl.util.errors import Damaged, UserError

FOLDER = "inputs"
RECORD = "inputs"  # of provenance.json


@dataclass(frozen=True)
class StoredInput:
    """A file for a key of the config.

    Args:
        key: Of the config.
        name: Its value there.
        path: The file on this machine.
        file: Its name in the run.
        sha256: Of its bytes.
        source: The address that it came from.
    """

    key: str
    name: str
    path: Path
    file: str
    sha256: str
    source: str

    def record(self) -> dict[str, str | int]:
        size = self.path.stat().st_size
        known = {"name": self.name, "file": self.file, "sha256": self.sha256}
        return {**known, "bytes": size, "source": self.source}


def sha256_in(provenance: Mapping[str, Any], key: str) -> str:
    """The hash of the file with which a run began; "" if none is recorded."""
    entry = (provenance.get(RECORD) or {}).get(key)
    return str(entry.get("sha256") or "") if isinstance(entry, Mapping) else ""


def stored(provenance: Mapping[str, Any], folder: Path, key: str, name: str) -> StoredInput | None:
    """The file of a key in a run or a bundle; None: its record, or the file itself, is missing.

    Args:
        folder: Of the run, or the bundle.

    Raises:
        Damaged: The file, or what provenance.json says of it, is not what was stored.
    """
    entry = (provenance.get(RECORD) or {}).get(key)
    if not isinstance(entry, Mapping) or entry.get("name") != name:
        return None
    file = Path(str(entry.get("file"))).name
    path = folder / FOLDER / file
    if not path.is_file():
        return None
    found = StoredInput(key, name, path, file, str(entry.get("sha256")), str(entry.get("source")))
    if path.is_symlink() or sha256_of(path) != found.sha256:
        what = f"it is not the file of {name} that was stored with the run"
        raise Damaged(path, what, f"remove it, and resume the run: {name} is stored again")
    return found


def store(inputs: Sequence[StoredInput], folder: Path) -> None:
    """Puts files into the folder of a run or a bundle, as links where the disk allows it."""
    for each in inputs:
        target = folder / FOLDER / each.file
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        source = each.path.resolve()  # Hugging Face's cache has a link to the file
        try:
            os.link(source, target)
        except OSError:
            with source.open("rb") as read, atomic_file(target) as written:
                shutil.copyfileobj(read, written)


def carry(provenance: Mapping[str, Any], run: Path, bundle: Path) -> None:
    """Puts a run's files into a bundle."""
    entries = (provenance.get(RECORD) or {}).items()
    names = {key: str(entry.get("name")) for key, entry in entries if isinstance(entry, Mapping)}
    kept = (stored(provenance, run, key, name) for key, name in names.items())
    store([each for each in kept if each is not None], bundle)


def remove(folder: Path) -> None:
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def placed(config: DictConfig, folder: Path, provenance: Mapping[str, Any]) -> DictConfig:
    """The config with the path of the stored file in place of what the run's `model.weights` named.

    Args:
        folder: Of the run, or the bundle.

    Raises:
        UserError: The file is missing, or is not what was stored.
    """
    entry = (provenance.get(RECORD) or {}).get(published.KEY)
    named = OmegaConf.select(config, published.KEY, throw_on_resolution_failure=False)
    is_kept = isinstance(entry, Mapping) and named is not None and entry.get("name") == str(named)
    name = str(named) if is_kept else published.name_in(config)
    if name is None:
        return config
    found = stored(provenance, folder, published.KEY, name)
    if found is None:
        raise UserError.at(
            published.KEY,
            what=f"the file of {name} is not in {folder / FOLDER}",
            remedy="start the job by distdl, which stores it there and sends it along",
            code="not-found",
        )
    OmegaConf.update(config, published.KEY, str(found.path))
    return config
