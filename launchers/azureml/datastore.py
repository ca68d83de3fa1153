"""The store of a run on Azure ML: a folder in a datastore, as a `distdl.stores.Store`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distdl.launchers.azureml.client import Connection, azure_errors
from distdl.launchers.common import RemoteFile, fetch_files, store_errors
from distdl.stores.azure import BlobStore
from distdl.util.errors import UserError

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential
    from azure.storage.blob import BlobProperties

ADDRESS = re.compile(r"azureml://(?:.*/)?datastores/([^/]+)/paths/(.+?)/?")
PATIENCE = 30.0  # seconds of retries while Azure does not answer; short, because a user waits


class DatastoreFolder(BlobStore):
    """A folder, opened with the datastore's own credential, else as the signed-in user. Its address
    is `azureml://datastores/NAME/paths/FOLDER`, which may include the workspace.

    Raises:
        UserError: The datastore does not store blobs, or Azure rejects the request.
    """

    def __init__(self, connection: Connection, address: str, *, patience: float = PATIENCE) -> None:
        if (match := ADDRESS.fullmatch(address)) is None:
            raise UserError.at(
                address, what="is not the address of a folder in a datastore", code="wrong-kind"
            )
        name, folder = match.groups()
        with azure_errors():
            facts = connection.client.datastores.get(name, include_secrets=True)
        if (container := getattr(facts, "container_name", None)) is None:
            raise UserError.at(
                name,
                what=f"is a datastore of type {facts.type}, but only Blob datastores can be read",
                code="wrong-kind",
            )
        account = facts.account_name
        endpoint = f"{facts.protocol}://{account}.blob.{facts.endpoint}"
        super().__init__(address, container, folder, account, endpoint, patience=patience)
        signature = getattr(facts.credentials, "sas_token", None)
        if key := getattr(facts.credentials, "account_key", None):
            signature = {"account_name": account, "account_key": key}
        self._secret = signature or connection.credential

    @property
    def url(self) -> str:
        """Its address for `open_store`, without a credential."""
        return f"{self._endpoint}/{self._container}/{self._folder}"

    def _credential(self, account: str) -> str | dict[str, str] | TokenCredential:
        return self._secret

    def files(self) -> dict[str, RemoteFile]:
        """All files, by name relative to the folder."""
        start = f"{self._folder}/"

        def listed() -> list[BlobProperties]:
            return [*self.client.list_blobs(start, include=["metadata"])]

        return {
            blob.name.removeprefix(start): RemoteFile(blob.size, blob.last_modified.timestamp())
            for blob in self.retried("", listed)
            if not (blob.metadata or {}).get("hdi_isfolder")  # the mark of a folder that mounts set
        }


def fetch(connection: Connection, address: str, to: Path) -> int:
    """Copies a datastore's folder; returns the number of files copied (see `fetch_files`)."""
    with store_errors():
        folder = DatastoreFolder(connection, address)
        files = folder.files()
        if not files:
            raise UserError.at("", what=f"there are no files in {address} yet", code="incomplete")
        return fetch_files(to, files, folder.download)


def send(connection: Connection, address: str, files: Mapping[str, Path]) -> int:
    """Uploads the files (name in the folder -> path) that the folder lacks; returns how many. They
    are uploaded in order, so manifests must be last."""
    with store_errors():
        folder = DatastoreFolder(connection, address)
        missing = [name for name in files if folder.size(name) is None]
        for name in missing:
            folder.upload(files[name], name)
    return len(missing)
