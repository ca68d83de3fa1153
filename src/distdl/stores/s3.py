"""Amazon S3, or a server with its protocol, as a store."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdl.stores.remote import RemoteStore
from distdl.stores.store import PATIENCE, Progress
from distdl.util.errors import StoreError, UserError

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from botocore.exceptions import ClientError

_BUSY = (408, 409, 429, 500, 502, 503, 504)  # 409: another request for the same object
PART = 8 << 20  # bytes, at least 5 MiB
MOST_PARTS = 10_000  # S3's limit
MARK = "distdl-upload"  # metadata key by which an upload recognises its own object


class S3Store(RemoteStore["BaseClient"]):
    """A prefix in a bucket. boto3 finds credentials, region and endpoint (AWS_ENDPOINT_URL).

    Raises:
        UserError: boto3 is missing.
    """

    def __init__(self, bucket: str, folder: str, *, patience: float = PATIENCE) -> None:
        super().__init__(f"s3://{bucket}/{folder}", folder, patience=patience)
        self._bucket = bucket
        try:
            import boto3  # noqa: F401
        except ImportError:
            raise UserError.at(
                self.uri,
                what="needs the package boto3",
                remedy="pip install 'distdl[s3]'",
                code="not-installed",
            ) from None

    def _connect(self) -> BaseClient:
        import boto3
        from botocore.config import Config

        config = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=10,
            read_timeout=20,
            max_pool_connections=32,
        )
        return boto3.session.Session().client("s3", config=config)

    def _server(self) -> str:
        return str(self.client.meta.endpoint_url)

    def _size(self, key: str) -> int | None:
        head = self._head(key)
        return None if head is None else int(head["ContentLength"])

    def _head(self, key: str) -> dict[str, Any] | None:
        from botocore.exceptions import ClientError

        try:
            return self.client.head_object(Bucket=self._bucket, Key=key)
        except ClientError as error:
            if _status(error) == 404:
                return None
            raise

    def _range(self, key: str, start: int, count: int) -> bytes:
        bytes_ = f"bytes={start}-{start + count - 1}"
        return self.client.get_object(Bucket=self._bucket, Key=key, Range=bytes_)["Body"].read()

    def _delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self._bucket, Key=key)

    def _put(self, path: Path, name: str, progress: Progress | None, replace: bool = False) -> None:
        """Uploads at once or in parts, which are invisible until the object is complete."""
        size = path.stat().st_size
        mark = {MARK: uuid.uuid4().hex}

        def store(request: Callable[..., object]) -> None:
            if replace:
                request()
            else:
                self._store_new(request, name, mark)

        new = {"Bucket": self._bucket, "Key": self._key(name)}
        if size <= PART:
            put = functools.partial(
                self.client.put_object, **new, Body=path.read_bytes(), Metadata=mark
            )
            self.retried(name, lambda: store(put), progress)
            if progress is not None:
                progress(size)
            return
        begin = functools.partial(self.client.create_multipart_upload, **new, Metadata=mark)
        new["UploadId"] = self.retried(name, begin, progress)["UploadId"]

        def send(number: int, data: bytes) -> dict[str, Any]:
            part = {"PartNumber": number + 1}
            return part | {"ETag": self.client.upload_part(**new, **part, Body=data)["ETag"]}

        try:
            length = max(PART, -(-size // MOST_PARTS))
            parts = {"Parts": self._send_parts(path, name, length, send, progress)}
            complete = functools.partial(
                self.client.complete_multipart_upload, **new, MultipartUpload=parts
            )
            self.retried(name, lambda: store(complete), progress)
        except BaseException:  # Ctrl-C, too, leaves no half upload, for which S3 takes money
            with suppress(Exception):  # raise the original error
                self.client.abort_multipart_upload(**new)
            raise

    def _store_new(self, store: Callable[..., Any], name: str, mark: dict[str, str]) -> None:
        """Stores an object; the server checks that there is none with that name.

        See https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html. If the
        server does not support conditions (501), the earlier check in `upload` has to suffice.

        Raises:
            StoreError: The object exists already.
        """
        from botocore.exceptions import ClientError

        try:
            store(IfNoneMatch="*")
        except ClientError as error:
            if _status(error) == 501:
                store()
                return
            if _status(error) not in (404, 412):
                raise
            # With our mark, an earlier try has stored the object, and its response was lost.
            if (self._head(self._key(name)) or {}).get("Metadata") != mark:
                if _status(error) == 404:
                    raise
                raise StoreError(f"{self.uri}/{name} exists already") from None

    def _list(self, start: str) -> Iterator[str]:
        pages = self.client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self._bucket, Prefix=start):
            yield from (item["Key"] for item in page.get("Contents", ()))

    def _is_transient(self, error: Exception) -> bool | None:
        from boto3.exceptions import Boto3Error
        from botocore import exceptions
        from botocore.exceptions import BotoCoreError, ClientError

        if isinstance(error, ClientError):
            return _status(error) in _BUSY
        # They are raised on this machine, and the same every time.
        settings: tuple[type[Exception], ...] = (
            exceptions.NoCredentialsError,
            exceptions.PartialCredentialsError,
            exceptions.NoRegionError,
            exceptions.ProfileNotFound,
            exceptions.SSOError,
            exceptions.TokenRetrievalError,
            exceptions.ParamValidationError,
        )
        if isinstance(error, settings):
            return False
        # boto3 wraps the errors of an upload and of a broken stream.
        return True if isinstance(error, (BotoCoreError, Boto3Error)) else None

    def _remedy(self, error: Exception) -> str:
        from botocore import exceptions
        from botocore.exceptions import ClientError, NoCredentialsError

        if self._is_absent(error):
            return f"create the bucket (aws s3 mb s3://{self._bucket}), or name another"
        refused = isinstance(error, ClientError) and _status(error) in (400, 401, 403)
        if isinstance(error, exceptions.SSOError | exceptions.TokenRetrievalError):
            return "aws sso login"
        own = isinstance(error, NoCredentialsError | exceptions.PartialCredentialsError)
        if refused or own:
            return (
                "aws configure, or export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...; they "
                f"need the right to read s3://{self._bucket} (to upload: to list and write it)"
            )
        return ""

    def _is_absent(self, error: Exception) -> bool:
        response = getattr(error, "response", None) or {}
        return response.get("Error", {}).get("Code") == "NoSuchBucket"


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
