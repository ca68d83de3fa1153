"""The shared link of `provision azureml sas`, at a real blob server (Azurite)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from distdl.launchers.azureml.provision import sas
from tests.cluster.arm_store import TENANT, certificate

AZURITE = shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
WHO = "12121212-3434-5656-7878-909090909090"

pytest.importorskip("azure.storage.blob")
pytestmark = [
    pytest.mark.skipif(AZURITE is None, reason="azurite-blob is not installed (npm i -g azurite)"),
    pytest.mark.xdist_group("azurite"),
]


class Identity:
    """A token as Entra makes them, which Azurite reads (`--oauth basic`)."""

    def get_token(self, *scopes: str, **more: Any) -> Any:
        from azure.core.credentials import AccessToken

        now = int(time.time())
        claims = {
            "aud": "https://storage.azure.com",
            "iss": f"https://sts.windows.net/{TENANT}/",
            "iat": now - 60,
            "nbf": now - 60,
            "exp": now + 3600,
            "oid": WHO,
            "tid": TENANT,
        }
        parts = ({"alg": "none", "typ": "JWT"}, claims)
        coded = [base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=") for p in parts]
        return AccessToken(b".".join([*coded, b"c2ln"]).decode(), now + 3600)


@pytest.fixture
def blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an account, over https."""
    public, private = certificate(tmp_path)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(public))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    options += ["--cert", str(public), "--key", str(private), "--oauth", "basic"]
    server = subprocess.Popen(
        [str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", str(port), *options]
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield f"https://127.0.0.1:{port}/{ACCOUNT}"
    finally:
        server.terminate()
        server.wait()


def test_the_link_reads_lists_and_nothing_else(blobs: str, capsys) -> None:
    from azure.core.exceptions import HttpResponseError
    from azure.storage.blob import BlobServiceClient, ContainerClient

    service = BlobServiceClient(blobs, credential=Identity())
    service.create_container("data").upload_blob("a.txt", b"hello")
    given = {"account": ACCOUNT, "container": "data", "days": 2, "endpoint": blobs}
    assert sas.run(given, Identity()) == 0
    link, note = capsys.readouterr()
    said = dict(urllib.parse.parse_qsl(link.strip().partition("?")[2]))
    assert (said["sp"], said["sr"], said["spr"], said["skoid"]) == ("rl", "c", "https", WHO)
    expiry = datetime.fromisoformat(said["se"])
    assert timedelta(days=1.9) < expiry - datetime.now(UTC) <= timedelta(days=2)
    assert "reads and lists data until" in note and said["sig"] not in note

    container = ContainerClient.from_container_url(readable(link.strip(), said, service))
    assert [blob.name for blob in container.list_blobs()] == ["a.txt"]
    assert container.download_blob("a.txt").readall() == b"hello"
    for forbidden in (
        lambda: container.upload_blob("b.txt", b"x"),
        lambda: container.delete_blob("a.txt"),
        lambda: container.upload_blob("a.txt", b"x", overwrite=True),
    ):
        with pytest.raises(HttpResponseError):
            forbidden()
    assert service.get_blob_client("data", "a.txt").download_blob().readall() == b"hello"


def readable(link: str, said: dict[str, str], service: Any) -> str:
    """The same link, signed as this Azurite checks it.

    From sv=2026 on two (empty) lines more are signed, which Azurite 3.35 does not know yet.
    """
    start, expiry = (datetime.fromisoformat(said[key]) for key in ("st", "se"))
    key = service.get_user_delegation_key(start, expiry)
    lines = [said["sp"], said["st"], said["se"], f"/blob/{ACCOUNT}/data"]
    lines += [said[name] for name in ("skoid", "sktid", "skt", "ske", "sks", "skv")]
    lines += ["", "", "", "", "", "", said["spr"], said["sv"], said["sr"], "", ""]
    lines += ["", "", "", "", ""]
    text = "\n".join(lines).encode()
    digest = hmac.new(base64.b64decode(key.value), text, hashlib.sha256).digest()
    said = {**said, "sig": base64.b64encode(digest).decode()}
    return f"{link.partition('?')[0]}?{urllib.parse.urlencode(said)}"
