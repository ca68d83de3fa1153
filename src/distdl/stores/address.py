"""Opens the store at a URI."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from distdl.stores.store import PATIENCE, Store
from distdl.util.errors import UserError

FORMS = (
    "a folder, azure://container/path, abfss://container@account.dfs.core.windows.net/path, "
    "https://account.blob.core.windows.net/container/path, or s3://bucket/path"
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")  # at least two letters, since C:/ is a drive
_LOOPBACK = re.compile(r"localhost|\d+\.\d+\.\d+\.\d+")


def is_remote(uri: str) -> bool:
    """Whether `uri` names a store on a network, and not a folder."""
    scheme = _SCHEME.match(uri)
    return scheme is not None and scheme[1].lower() != "file"


def open_store(uri: str, *, patience: float = PATIENCE) -> Store:
    """The store at a URI. This sends no request yet.

    - `/path`, `file:///path`: a folder, also a mounted one.
    - `azure://container/path`, or `az://`: the account is that of AZURE_STORAGE_CONNECTION_STRING
      or AZURE_STORAGE_ACCOUNT.
    - `abfs[s]://container@account.dfs.core.windows.net/path`, as Spark and Azure ML write it.
    - `https://account.blob.core.windows.net/container/path[?SAS]`.
    - `s3://bucket/path`: boto3 finds credentials and endpoint.

    The credential for Azure is the first of: the SAS in the URI, the connection string,
    AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, azure-identity's DefaultAzureCredential (managed
    identity on Azure, `az login` elsewhere). `patience` is in seconds, as for `RemoteStore`.

    Raises:
        UserError: The URI has none of these forms, no account is named, or the backend's package
            is missing (the error says which extra to install).
    """
    if not uri:  # an unset variable; Path would take it as the current folder
        raise UserError.at("", what="the address is empty", remedy=FORMS, code="missing-key")
    match = _SCHEME.match(uri)
    scheme = match[1].lower() if match else "file"
    if scheme == "file":
        from distdl.stores.files import FileStore

        path = unquote(urlsplit(uri).path) if match else uri
        return FileStore(Path(path).expanduser())
    if scheme == "s3":
        from distdl.stores.s3 import S3Store

        bucket, _, folder = uri[len("s3://") :].partition("/")
        if not bucket:
            raise UserError.at(
                uri, what="names no bucket", remedy="s3://bucket/path", code="wrong-kind"
            )
        return S3Store(bucket, folder, patience=patience)
    return _azure(uri, scheme, patience)


def _azure(uri: str, scheme: str, patience: float) -> Store:
    from distdl.stores.azure import BlobStore

    parts = urlsplit(uri)
    shown = uri.partition("?")[0]  # a signature is a secret
    host = parts.hostname or ""
    account = endpoint = ""
    if scheme in ("http", "https"):
        container, _, folder = parts.path.strip("/").partition("/")
        account, _, rest = host.partition(".blob.")
        endpoint = f"{scheme}://{parts.netloc}"
        if _LOOPBACK.fullmatch(host):  # an emulator: the account is the first path component
            account = container
            endpoint = f"{endpoint}/{account}"
            container, _, folder = folder.partition("/")
        elif not rest:
            raise UserError.at(
                shown,
                what="is not an address of Azure Blob, the only https address that distdl reads",
                remedy=FORMS,
                code="wrong-kind",
            )
    elif scheme in ("azure", "az", "abfs", "abfss"):
        folder = parts.path
        container = parts.username or host
        if parts.username:
            account, _, domain = host.partition(".")
            endpoint = f"https://{account}.{re.sub('^dfs[.]', 'blob.', domain)}"
    else:
        raise UserError.at(
            shown, what="is an address of an unknown form", remedy=FORMS, code="wrong-kind"
        )
    if not container:
        raise UserError.at(shown, what="names no container", remedy=FORMS, code="wrong-kind")
    return BlobStore(
        shown, container, unquote(folder), account, endpoint, parts.query, patience=patience
    )
