"""The far store of a run: a folder of a datastore, copied from and to by blobs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from distdl.errors import Problem, UserError
from distdl.launchers.azureml.client import Connection, told

ADDRESS = re.compile(r"azureml://(?:.*/)?datastores/([^/]+)/paths/(.+?)/?")


class Store:
    """One folder of a datastore.

    Args:
        connection: To its workspace.
        address: `azureml://datastores/NAME/paths/FOLDER`, or the same with the workspace before.
    """

    def __init__(self, connection: Connection, address: str) -> None:
        found = ADDRESS.fullmatch(address)
        if found is None:
            raise UserError(Problem(address, "is no folder of a datastore"))
        self.datastore, self.folder = found.groups()
        self._connection = connection

    def container(self) -> Any:
        """The blob container, by the datastore's own credential, or by whoever is signed in.

        Raises:
            UserError: The datastore is none of blobs, or Azure refuses.
        """
        from azure.storage.blob import ContainerClient

        found = self._connection.client.datastores.get(self.datastore, include_secrets=True)
        container = getattr(found, "container_name", None)
        if container is None:
            what = f"is a datastore of type {found.type}; only those of blobs can be copied from"
            raise UserError(Problem(self.datastore, what))
        own = found.credentials
        key = getattr(own, "sas_token", None) or getattr(own, "account_key", None)
        account = f"{found.protocol}://{found.account_name}.blob.{found.endpoint}"
        return ContainerClient(account, container, credential=key or self._connection.credential)

    def fetch(self, to: Path) -> int:
        """Copies the folder into `to`; what is there in the same size and not older is kept, and so
        are the run's own files (`distdl.inside`).

        Returns:
            How many files were copied.

        Raises:
            UserError: There is nothing, or Azure refuses.
        """
        from distdl.inside import places

        copied = 0
        with told(), self.container() as container:
            found = {
                blob.name.removeprefix(f"{self.folder}/"): blob
                for blob in container.list_blobs(
                    name_starts_with=f"{self.folder}/", include=["metadata"]
                )
                if not (blob.metadata or {}).get("hdi_isfolder")  # how mounts mark a folder
            }
            for name, target in places(to, found).items():
                blob = found[name]
                if is_same(target, blob):
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary = target.with_name(f".{target.name}.part")
                temporary.unlink(missing_ok=True)
                with temporary.open("wb") as file:
                    container.download_blob(blob.name).readinto(file)
                temporary.replace(target)
                copied += 1
        if not found:
            what = f"nothing is in {self.folder} of the datastore {self.datastore} yet"
            raise UserError(Problem("", what))
        return copied

    def send(self, files: dict[str, Path]) -> int:
        """Copies files that the folder lacks; returns how many.

        Args:
            files: Name in the folder -> file. Their order is kept: manifests come last.
        """
        sent = 0
        with told(), self.container() as container:
            for name, path in files.items():
                blob = container.get_blob_client(f"{self.folder}/{name}")
                if not blob.exists():
                    with path.open("rb") as file:
                        blob.upload_blob(file)
                    sent += 1
        return sent


def is_same(target: Path, blob: Any) -> bool:
    try:
        status = target.stat()
    except FileNotFoundError:
        return False
    return status.st_size == blob.size and status.st_mtime >= blob.last_modified.timestamp()
