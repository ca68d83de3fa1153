"""What the tests of launcher=sagemaker share: settings, a run's folder, and AWS as moto has it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distdl.job import JobSpec, Resources
from distdl.launchers.sagemaker import SageMakerLauncher, uploads
from distdl.launchers.sagemaker.aws import Aws

REGION = "eu-west-1"
NODE: dict[str, Any] = {
    "role": "arn:aws:iam::123456789012:role/train",
    "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/distdl:1",
    "instance_type": "ml.g5.12xlarge",
    "bucket": "my-bucket",
    "region": REGION,
}
EVERYTHING: dict[str, Any] = {
    **NODE,
    "instance_type": "ml.p4d.24xlarge",
    "prefix": "team/vision",
    "volume_gb": 500,
    "walltime": "2-00:00:00",
    "spot": True,
    "max_wait": "4-00:00:00",
    "retries": 3,
    "subnets": ["subnet-0123", "subnet-4567"],
    "security_groups": ["sg-0123"],
    "encrypt_traffic": True,
    "kms_key": "arn:aws:kms:eu-west-1:123456789012:key/1234",
    "tags": {"team": "vision"},
    "env": {"NCCL_DEBUG": "INFO"},
    "inputs": {
        "imagenet": {"path": "s3://data/imagenet", "mode": "FastFile"},
        "labels": "s3://data/labels",
        "scratch": {"path": "fsx://fs-0123456789abcdef0/abcdefgh/scratch", "mode": "rw"},
        "shared": "efs://fs-0123456789abcdef0/shared",
    },
    "forward_env": ["WANDB_API_KEY"],
}


def spec(store: Path | str = "RUN", **fields: Any) -> JobSpec:
    values: dict[str, Any] = {
        "name": "resnet50_ddp/x",
        "bundle": f"{store}/attempts/001/bundle",
        "store": str(store),
        "attempt": 1,
        "resources": Resources(2, 4, "gpu"),
    }
    return JobSpec(**{**values, **fields})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with the bundle of its first attempt."""
    bundle = tmp_path / "run/attempts/001/bundle"
    (bundle / "code/distdl").mkdir(parents=True)
    (bundle / "config.yaml").write_text("seed: 0\n")
    (bundle / "code/distdl/__init__.py").write_text("")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """AWS on this machine."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws(moto: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Aws:
    """Clients of an account with nothing but our bucket in it."""
    urllib.request.urlopen(urllib.request.Request(f"{moto}/moto-api/reset", method="POST"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    clients = Aws(REGION)
    where = {"LocationConstraint": REGION}
    clients("s3").create_bucket(Bucket="my-bucket", CreateBucketConfiguration=where)
    return clients


def keys(aws: Aws) -> set[str]:
    return {key for key, _ in uploads.objects(aws("s3"), "my-bucket", "")}


@pytest.fixture
def launcher(aws: Aws) -> SageMakerLauncher:
    found = SageMakerLauncher(**NODE, forward_env=["SAMPLE_KEY"])
    vars(found)["aws"] = aws
    return found
