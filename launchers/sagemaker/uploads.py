"""Uploads before a job is created: bundle and history to S3, secrets to Secrets Manager."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdl.launchers.common import forwarded, manifests_last, pack
from distdl.launchers.sagemaker.aws import Aws, aws_errors, code_of
from distdl.launchers.sagemaker.sagemaker_request import SageMakerRequest
from distdl.util.errors import UserError

if TYPE_CHECKING:
    from botocore.client import BaseClient

# Folders to upload of a run that began elsewhere (with launcher=local), so that it can resume.
HISTORY = ("checkpoints", "logs", "tracking")


def send(folder: Path, s3: BaseClient, bucket: str, key: str) -> None:
    """Uploads a folder as one archive."""
    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(temporary, "archive")
        pack(folder, archive)
        s3.upload_file(str(archive), bucket, key)


def upload(request: SageMakerRequest, aws: Aws) -> None:
    """Uploads bundle, history and secrets. Secrets are last: after a failed upload there are none.

    Raises:
        UserError: AWS rejects an upload, or the prefix has another run.
    """
    with aws_errors():
        refuse_another_run(request, aws)
        bucket = str(request.settings.bucket)
        send(Path(request.spec.bundle), aws("s3"), bucket, request.bundle_key)
        upload_history(request, aws)
        for name, value in forwarded(request.spec).items():
            put_secret(aws("secretsmanager"), request.secrets[name], value, request.tag)


def refuse_another_run(request: SageMakerRequest, aws: Aws) -> None:
    """Refuses a prefix that has another run of the same name (of another project): training would
    resume from that run's checkpoints."""
    from botocore.exceptions import ClientError

    key = f"{request.store_key}/config.yaml"
    config = Path(request.spec.bundle) / "config.yaml"
    try:
        stored = aws("s3").get_object(Bucket=request.settings.bucket, Key=key)["Body"].read()
    except ClientError as error:
        # Without the permission s3:ListBucket, AWS answers 403 for an absent object.
        if code_of(error) in ("NoSuchKey", "404", "AccessDenied", "403"):
            return
        raise
    if stored != config.read_bytes():
        raise UserError.at(
            "launcher.prefix",
            what=f"{request.uri(request.key)} has a run of the same name with another config",
            remedy="choose another name or launcher.prefix",
            code="mismatch",
        )


def upload_history(request: SageMakerRequest, aws: Aws) -> None:
    """Uploads files of the run's history that S3 lacks, so that the run resumes."""
    s3 = aws("s3")
    bucket = str(request.settings.bucket)
    run = Path(request.spec.store)
    paths = (path for top in HISTORY for path in (run / top).rglob("*"))
    names = [p.relative_to(run).as_posix() for p in paths if p.is_file() and not p.is_symlink()]
    stored = {key for key, _ in objects(s3, bucket, f"{request.store_key}/")} if names else set()
    for name in manifests_last(names):
        key = f"{request.store_key}/{name}"
        if key not in stored:
            s3.upload_file(str(run / name), bucket, key)


def put_secret(client: BaseClient, name: str, value: str, run: str) -> None:
    from botocore.exceptions import ClientError

    try:
        client.put_secret_value(SecretId=name, SecretString=value)
    except ClientError as error:
        if code_of(error) != "ResourceNotFoundException":
            raise
        tags = [{"Key": "distdl:run", "Value": run}]
        client.create_secret(Name=name, SecretString=value, Tags=tags)


def objects(s3: BaseClient, bucket: str, prefix: str) -> list[tuple[str, dict[str, Any]]]:
    """The key of every object below a prefix, and its entry in S3's listing."""
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [(o["Key"], o) for page in pages for o in page.get("Contents", ())]
