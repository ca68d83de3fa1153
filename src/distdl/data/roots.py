"""What a `data.root` is: a URI or a folder, of shards, of splits or of images alone."""

from __future__ import annotations

from pathlib import Path

from distdl.datasets.format import MANIFEST
from distdl.stores import PATIENCE, is_remote, open_store
from distdl.util.cache_folder import default_root

QUICK = 5.0  # seconds that a check waits for a server


def expanded(root: str) -> str:
    """A URI, or a path without `~` and `file://`."""
    return root if is_remote(root) else open_store(root).uri


def is_prepared(root: str) -> bool:
    """Whether `root` holds shards, and not folders of images."""
    return is_remote(root) or Path(root, MANIFEST).exists()


def is_listed(root: str, patience: float = PATIENCE) -> bool:
    """Whether `root` holds images that are neither prepared nor divided into splits."""
    if is_remote(root):
        return open_store(root, patience=patience).size(MANIFEST) is None
    return Path(root).is_dir() and not any(Path(root, name).exists() for name in (MANIFEST, "val"))


def cache_root(folder: str | None) -> Path:
    """Where the shards of a URI are cached, by `data.cache_dir`."""
    return Path(folder).expanduser() if folder else default_root()
