"""A real blob server (Azurite): `jobs fetch` from a store with names that lead out of the run, and
the shared link of `provision azureml sas`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import HttpResponseError
from azure.storage.blob import BlobServiceClient, ContainerClient

from distdl.launchers.azureml import datastore
from distdl.launchers.azureml.provision import sas
from tests.cluster.arm_store import TENANT
from tests.cluster.azurite import ACCOUNT, CONTAINER, KEY, Azurite, Places
from tests.prepared import refusal

pytestmark = [
    pytest.mark.skipif(shutil.which("azurite-blob") is None, reason="npm install -g azurite"),
    pytest.mark.xdist_group("azurite"),
]
FOLDER = "distdl/e/run"
GOOD = ("config.yaml", "attempts/001/status.json", "checkpoints/a b.ckpt")
BAD = ("../outside", "a/../../outside", "link/x", "C:/outside", "a//b")
USER = "12121212-3434-5656-7878-909090909090"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    folder = tmp_path_factory.mktemp("azurite")
    azurite = Azurite(Places(folder), folder / "blobs", "--oauth", "basic")
    yield azurite
    azurite.close()


@pytest.fixture
def azurite(server: Azurite, monkeypatch: pytest.MonkeyPatch) -> Azurite:
    """Trusted by this process, where each host name is this machine's."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(server.places.certificate))
    find = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **rest: find("127.0.0.1", *more))
    return server


def put(azurite: Azurite, name: str, content: bytes) -> None:
    """Like an attacker: the SDK would turn `a/../b` into `b`."""
    context = ssl._create_unverified_context()
    line = http.client.HTTPSConnection("127.0.0.1", azurite.port, context=context)
    path = f"/{ACCOUNT}/{CONTAINER}/{quote(name, safe='').replace('.', '%2e')}?{azurite.sas()}"
    line.request("PUT", path, content, {"x-ms-blob-type": "BlockBlob"})
    assert line.getresponse().status == 201
    line.close()


def workspace_of(azurite: Azurite) -> Any:
    """A workspace whose datastores are all in the emulator."""
    facts = SimpleNamespace(container_name=CONTAINER, account_name=ACCOUNT, protocol="https")
    facts.endpoint, facts.credentials = azurite.domain, SimpleNamespace(account_key=KEY)
    datastores = SimpleNamespace(get=lambda name, include_secrets: facts)
    return SimpleNamespace(client=SimpleNamespace(datastores=datastores))


def test_names_are_not_trusted(azurite: Azurite, tmp_path: Path, capsys: Any) -> None:
    workspace, address = workspace_of(azurite), f"azureml://datastores/x/paths/{FOLDER}"
    here = tmp_path / "a/b/here"
    for folder in (here, tmp_path / "target"):
        folder.mkdir(parents=True)
    (here / "link").symlink_to(tmp_path / "target")
    for name in (*GOOD, *BAD):
        put(azurite, f"{FOLDER}/{name}", name.encode())
    with azurite.service().get_container_client(CONTAINER) as container:
        container.upload_blob(f"{FOLDER}/attempts", b"", metadata={"hdi_isfolder": "true"})
    assert datastore.fetch(workspace, address, here) == len(GOOD)
    assert datastore.fetch(workspace, address, here) == 0
    sent = {"checkpoints/a b.ckpt": here / "config.yaml", "new": here / "config.yaml"}
    assert datastore.send(workspace, address, sent) == 1
    elsewhere = "azureml://datastores/x/paths/elsewhere"
    assert "elsewhere" in str(refusal(datastore.fetch, workspace, elsewhere, here))
    files = {p.relative_to(here).as_posix() for p in here.rglob("*") if p.is_file()}
    assert files == {*GOOD}
    assert not [*tmp_path.rglob("outside")] and not [*(tmp_path / "target").iterdir()]
    messages = capsys.readouterr().err
    assert [name for name in BAD if f"left out   {name!a}: " not in messages] == []
    assert "'attempts'" not in messages, "how a mount marks a folder"


class Identity:
    """Gives tokens like Entra's, which Azurite reads (`--oauth basic`)."""

    def get_token(self, *scopes: str, **more: Any) -> Any:
        now = int(time.time())
        claims = {"iat": now - 60, "nbf": now - 60, "exp": now + 3600, "oid": USER, "tid": TENANT}
        claims |= {"aud": "https://storage.azure.com", "iss": f"https://sts.windows.net/{TENANT}/"}
        parts = ({"alg": "none", "typ": "JWT"}, claims)
        coded = [base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=") for p in parts]
        return AccessToken(b".".join([*coded, b"c2ln"]).decode(), now + 3600)


def test_the_link_reads_and_lists_and_does_nothing_else(azurite: Azurite, capsys: Any) -> None:
    blobs = f"https://127.0.0.1:{azurite.port}/{ACCOUNT}"
    service = BlobServiceClient(blobs, credential=Identity())
    service.create_container("data").upload_blob("a.txt", b"hello")
    options = {"account": ACCOUNT, "container": "data", "days": 2, "endpoint": blobs}
    assert sas.run(options, Identity()) == 0
    link, note = capsys.readouterr()
    query = dict(parse_qsl(link.strip().partition("?")[2]))
    assert (query["sp"], query["sr"], query["spr"], query["skoid"]) == ("rl", "c", "https", USER)
    expiry = datetime.fromisoformat(query["se"])
    assert timedelta(days=1.9) < expiry - datetime.now(UTC) <= timedelta(days=2)
    assert "reads and lists data until" in note and query["sig"] not in note
    query["sig"] = signature(query, service)
    container = ContainerClient.from_container_url(f"{link.partition('?')[0]}?{urlencode(query)}")
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


def signature(query: dict[str, str], service: Any) -> str:
    """The link's signature as this Azurite checks it.

    From sv=2026 on, two more (empty) lines are signed, which Azurite 3.35 does not know yet.
    """
    key = service.get_user_delegation_key(*(datetime.fromisoformat(query[k]) for k in ("st", "se")))
    lines = [query["sp"], query["st"], query["se"], f"/blob/{ACCOUNT}/data"]
    lines += [query[name] for name in ("skoid", "sktid", "skt", "ske", "sks", "skv")]
    lines += [*[""] * 6, query["spr"], query["sv"], query["sr"], *[""] * 7]
    digest = hmac.new(base64.b64decode(key.value), "\n".join(lines).encode(), hashlib.sha256)
    return base64.b64encode(digest.digest()).decode()
