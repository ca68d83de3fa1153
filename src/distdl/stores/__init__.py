"""A folder, Azure Blob, S3: one small interface for all places that keep files.

    store = open_store("azure://container/imagenet")
    store.read("dataset.json")
    store.download("train-00000.tar", to=Path("train-00000.tar"))

A store is picklable and holds no connection until it is used: each process makes its own client,
after the fork. Files have names relative to the URI, with `/` between folders.
"""

from __future__ import annotations

from distdl.stores.address import is_remote, open_store
from distdl.stores.store import PATIENCE, Absent, Progress, Store, StoreError

__all__ = ["PATIENCE", "Absent", "Progress", "Store", "StoreError", "is_remote", "open_store"]
