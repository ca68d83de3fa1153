"""Azure Blob as a store, through azure-storage-blob."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdl.stores.remote import PART, RemoteStore
from distdl.stores.store import PATIENCE, Progress
from distdl.util.errors import StoreError, UserError

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential
    from azure.storage.blob import BlobBlock, BlobProperties, ContainerClient

_CONNECTION, _ACCOUNT = "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT"
_KEY, _SAS = "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"
_SOURCES = "docs/data/reading.md, URIs and credentials"
_INSTALL = "pip install 'distdl[azure]'"
_BUSY = (408, 429, 500, 502, 503, 504)
_MARK = "distdl_upload"  # metadata key by which an upload recognises its own blob


class BlobStore(RemoteStore["ContainerClient"]):
    """A folder in a container.

    Args:
        uri: As the user wrote it, without its signature.
        account, endpoint: The account's name and URL; "": from the environment.
        sas: A signature, or "".

    Raises:
        UserError: azure-storage-blob is missing, or no account is named.
    """

    def __init__(
        self,
        uri: str,
        container: str,
        folder: str,
        account: str = "",
        endpoint: str = "",
        sas: str = "",
        *,
        patience: float = PATIENCE,
    ) -> None:
        super().__init__(uri, folder, patience=patience)
        try:
            import azure.storage.blob  # noqa: F401
        except ImportError:
            raise UserError.at(
                uri,
                what="needs the package azure-storage-blob",
                remedy=_INSTALL,
                code="not-installed",
            ) from None
        if not account and not os.environ.get(_CONNECTION) and not os.environ.get(_ACCOUNT):
            raise UserError.at(
                uri,
                what=f"names no account, and neither {_CONNECTION} nor {_ACCOUNT} is set",
                remedy=f"export {_ACCOUNT}=name, or abfss://{container}@ACCOUNT.dfs.core.windows.net/",
                code="wrong-kind",
            )
        self._container = container
        self._account = account
        self._endpoint = endpoint
        self._sas = sas

    def _connect(self) -> ContainerClient:
        # At INFO, azure logs each request with its headers, and azure.identity logs each way to
        # sign in that it does not use.
        for name, level in (("azure", logging.WARNING), ("azure.identity", logging.CRITICAL)):
            sdk = logging.getLogger(name)
            if sdk.level == logging.NOTSET:
                sdk.setLevel(level)
        from azure.storage.blob import ContainerClient

        # RemoteStore retries: the package's own retries wait 15 s before the first.
        options: dict[str, Any] = {"retry_total": 0, "connection_timeout": 10, "read_timeout": 20}
        options["max_single_get_size"] = PART  # a part is one request
        text = "" if self._endpoint else os.environ.get(_CONNECTION, "")
        try:
            if text:
                return ContainerClient.from_connection_string(text, self._container, **options)
            account = self._account or os.environ[_ACCOUNT]
            endpoint = self._endpoint or f"https://{account}.blob.core.windows.net"
            options["credential"] = self._credential(account)
            return ContainerClient(endpoint, self._container, **options)
        except ValueError:  # its text may hold the key
            what = "is not an address of an account or container"
            remedy = f"correct {_ACCOUNT} or the URI"
            if text:
                what = f"{_CONNECTION} is not a connection string"
                remedy = "copy all of it, in quotes: az storage account show-connection-string"
            raise UserError.at(self.uri, what=what, remedy=remedy, code="wrong-kind") from None

    def _credential(self, account: str) -> str | dict[str, str] | TokenCredential:
        if self._sas:
            return self._sas
        parts = os.environ.get(_CONNECTION, "").split(";")
        settings = dict(part.partition("=")[::2] for part in parts)
        key = sas = None
        if settings.get("AccountName") == account:
            key, sas = settings.get("AccountKey"), settings.get("SharedAccessSignature")
        elif os.environ.get(_ACCOUNT, account) == account:
            key, sas = os.environ.get(_KEY), os.environ.get(_SAS)
        if key:  # the account is passed too, since an emulator's address does not name it
            return {"account_name": account, "account_key": key}
        if sas:
            return sas.lstrip("?")
        try:
            from azure.identity import DefaultAzureCredential
        except ImportError:
            raise UserError.at(
                self.uri,
                what=f"no {_KEY} and no {_SAS} is set, and azure-identity is not installed",
                remedy=_INSTALL,
                code="not-installed",
            ) from None
        return DefaultAzureCredential()

    def _server(self) -> str:
        return str(self.client.url).partition("?")[0]  # without the signature

    def _size(self, key: str) -> int | None:
        properties = self._properties(key)
        return None if properties is None else int(properties.size)

    def _properties(self, key: str) -> BlobProperties | None:
        from azure.core.exceptions import HttpResponseError

        try:
            return self.client.get_blob_client(key).get_blob_properties()
        except HttpResponseError as error:
            # A HEAD response has no body, so an absent container looks like an absent blob.
            if error.status_code == 404:
                return None
            raise

    def _range(self, key: str, start: int, count: int) -> bytes:
        return self.client.download_blob(key, offset=start, length=count).readall()

    def _delete(self, key: str) -> None:
        from azure.core.exceptions import ResourceNotFoundError

        with suppress(ResourceNotFoundError):
            self.client.get_blob_client(key).delete_blob()

    def _put(self, path: Path, name: str, progress: Progress | None, replace: bool = False) -> None:
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        blob = self.client.get_blob_client(self._key(name))
        size = path.stat().st_size
        length = max(PART, -(-size // 50_000))  # Azure's limit of blocks per blob
        upload = uuid.uuid4().hex[:8]

        def stage(number: int, data: bytes) -> BlobBlock:
            block = f"{upload}-{number:016d}"
            blob.stage_block(block, data, length=len(data), validate_content=True)
            return BlobBlock(block)

        # Blocks are invisible until the list is committed.
        blocks = self._send_parts(path, name, length, stage, progress)

        mark = {_MARK: upload}
        # None: whatever is there is replaced.
        missing = None if replace else MatchConditions.IfMissing

        def commit() -> None:
            blob.commit_block_list(blocks, metadata=mark, match_condition=missing)

        try:
            self.retried(name, commit, progress)
        except StoreError:
            # With our mark, an earlier try has stored the blob, and its response was lost.
            stored = self.retried(name, lambda: self._properties(self._key(name)))
            if stored is None or stored.metadata != mark:
                raise

    def _list(self, start: str) -> Iterator[str]:
        for blob in self.client.list_blobs(name_starts_with=start, include=["metadata"]):
            if not (blob.metadata or {}).get("hdi_isfolder"):  # the mark of a folder
                yield blob.name

    def _is_transient(self, error: Exception) -> bool | None:
        from azure.core import exceptions

        if isinstance(error, exceptions.ClientAuthenticationError):
            return False
        if isinstance(error, exceptions.HttpResponseError) and error.status_code is not None:
            return error.status_code in _BUSY
        return True if isinstance(error, exceptions.AzureError) else None

    def _remedy(self, error: Exception) -> str:
        from azure.core import exceptions

        if self._is_absent(error):
            command = f"az storage container create --name {self._container}"
            return f"create the container ({command}), or name another"
        status = getattr(error, "status_code", None)
        if status in (401, 403):
            if getattr(error, "error_code", None) == "AuthorizationPermissionMismatch":
                return "your identity needs the role Storage Blob Data Reader (upload: Contributor)"
            return f"check the account's name and its credential: {_SOURCES}"
        if not isinstance(error, exceptions.ClientAuthenticationError) or status is not None:
            return ""
        if type(error).__name__ == "AzureSigningError":
            return f"{_KEY}, or AccountKey in {_CONNECTION}, is not an account key: copy it again"
        return f"az login, or export {_KEY}=...: {_SOURCES}"

    def _is_absent(self, error: Exception) -> bool:
        return getattr(error, "error_code", None) == "ContainerNotFound"
