"""AWS on this machine: moto, over http, with the real boto3.

from tests.aws import REGION, aws, moto, s3     # fixtures
"""

import functools
import urllib.request

import pytest

from distdl.launchers.sagemaker.aws import Aws

REGION = "eu-west-1"


@pytest.fixture(scope="module")
def moto():
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _parse_each_description_once()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@functools.cache
def _parse_each_description_once():
    """boto3 parses 2 MB of JSON about AWS's services for each session, and each command has its
    own sessions."""
    from botocore.loaders import JSONFileLoader

    parsed = functools.cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda loader, path: parsed(path)


@pytest.fixture(scope="module")
def s3(moto):
    """A real server over HTTP, and an account that opens nothing else."""
    account = {
        "ACCESS_KEY_ID": "testing",
        "SECRET_ACCESS_KEY": "testing",
        "ENDPOINT_URL": moto,
        "DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in account.items():
            patch.setenv(f"AWS_{name}", value)
        import boto3

        boto3.client("s3").create_bucket(Bucket="box")
        yield


@pytest.fixture
def aws(moto, monkeypatch, tmp_path):
    """Clients of an account with nothing but our bucket in it."""
    urllib.request.urlopen(urllib.request.Request(f"{moto}/moto-api/reset", method="POST"))
    variables = {"ENDPOINT_URL": moto, "ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test"}
    for name, value in {**variables, "CONFIG_FILE": f"{tmp_path}/none"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    clients = Aws(REGION)
    location = {"LocationConstraint": REGION}
    clients("s3").create_bucket(Bucket="my-bucket", CreateBucketConfiguration=location)
    return clients
