"""One small interface for storage backends: a folder, Azure Blob, S3.

    store = open_store("azure://container/imagenet")
    store.read("dataset.json")
    store.download("train-00000.tar", to=Path("train-00000.tar"))

A store is picklable and connects on first use, so that each process creates its own client after a
fork. File names are relative to the URI, with `/` between folders.
"""

from __future__ import annotations

from distdl.stores.address import is_remote, open_store
from distdl.stores.store import PATIENCE, Progress, Store
from distdl.util.errors import Absent, StoreError

__all__ = ["PATIENCE", "Absent", "Progress", "Store", "StoreError", "is_remote", "open_store"]
