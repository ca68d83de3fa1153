"""The store of a run on Azure ML: a folder of a datastore, as a `distdl.stores.Store`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distdl.launchers.azureml.client import Connection, azure_errors
from distdl.launchers.common import FarFile, fetch_files
from distdl.stores.azure import BlobStore
from distdl.stores.store import StoreError
from distdl.util.errors import UserError

ADDRESS = re.compile(r"azureml://(?:.*/)?datastores/([^/]+)/paths/(.+?)/?")
PATIENCE = 30.0  # seconds to keep trying while Azure does not answer: somebody is waiting


class DatastoreFolder(BlobStore):
    """A folder, opened by the datastore's own credential, or as whoever is signed in.

    Args:
        connection: To its workspace.
        address: `azureml://datastores/NAME/paths/FOLDER`, or the same with the workspace before.

    Raises:
        UserError: The datastore is none of blobs, or Azure refuses.
    """

    def __init__(self, connection: Connection, address: str) -> None:
        match = ADDRESS.fullmatch(address)
        if match is None:
            raise UserError.at(address, "is no folder of a datastore")
        name, folder = match.groups()
        with azure_errors():
            facts = connection.client.datastores.get(name, include_secrets=True)
        container = getattr(facts, "container_name", None)
        if container is None:
            what = f"is a datastore of type {facts.type}; only those of blobs can be copied from"
            raise UserError.at(name, what)
        account = facts.account_name
        endpoint = f"{facts.protocol}://{account}.blob.{facts.endpoint}"
        super().__init__(address, container, folder, account, endpoint, patience=PATIENCE)
        signature = getattr(facts.credentials, "sas_token", None)
        if key := getattr(facts.credentials, "account_key", None):
            signature = {"account_name": account, "account_key": key}
        self._secret = signature or connection.credential

    def _credential(self, account: str) -> Any:
        return self._secret

    def files(self) -> dict[str, FarFile]:
        """All of them, by their names in the folder."""
        start = f"{self._folder}/"
        listed = lambda: list(self.client.list_blobs(start, include=["metadata"]))  # noqa: E731
        return {
            blob.name.removeprefix(start): FarFile(blob.size, blob.last_modified.timestamp())
            for blob in self.retried("", listed)
            if not (blob.metadata or {}).get("hdi_isfolder")  # how mounts mark a folder
        }


def fetch(connection: Connection, address: str, to: Path) -> int:
    """Copies a folder of a datastore; returns how many files were copied (see `fetch_files`).

    Raises:
        UserError: There is nothing, or Azure refuses.
    """
    with store_errors():
        folder = DatastoreFolder(connection, address)
        files = folder.files()
        if not files:
            raise UserError.at("", f"nothing is in {address} yet")
        return fetch_files(to, files, folder.download)


def send(connection: Connection, address: str, files: Mapping[str, Path]) -> int:
    """Copies files that the folder lacks; returns how many.

    Args:
        connection: To the workspace.
        address: Of the folder.
        files: Name in the folder -> file. Their order is kept: manifests come last.

    Raises:
        UserError: Azure refuses.
    """
    with store_errors():
        folder = DatastoreFolder(connection, address)
        missing = [name for name in files if folder.size(name) is None]
        for name in missing:
            folder.upload(files[name], name)
    return len(missing)


@contextmanager
def store_errors() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise UserError.at("", str(error), error.remedy) from error
