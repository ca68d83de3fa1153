"""`jobs fetch` from a real Azurite: blobs whose names lead out, or through a link, stay there."""

from __future__ import annotations

import http.client
import shutil
import socket
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from distdl.errors import UserError
from distdl.launchers.azureml import datastore
from tests.cluster.azurite import ACCOUNT, CONTAINER, KEY, Azurite, Places

pytestmark = pytest.mark.skipif(
    shutil.which("azurite-blob") is None, reason="not installed: npm install -g azurite"
)
FOLDER = "distdl/e/run"
GOOD = ("config.yaml", "attempts/001/status.json", "checkpoints/a b.ckpt")
BAD = ("../outside", "a/../../outside", "link/x", "C:/outside", "a//b")


def put(azurite: Azurite, name: str, content: bytes) -> None:
    """As an attacker would: the SDK itself makes `b` of `a/../b`."""
    context = ssl._create_unverified_context()
    line = http.client.HTTPSConnection("127.0.0.1", azurite.port, context=context)
    path = f"/{ACCOUNT}/{CONTAINER}/{quote(name, safe='').replace('.', '%2e')}?{azurite.sas()}"
    line.request("PUT", path, content, {"x-ms-blob-type": "BlockBlob"})
    assert line.getresponse().status == 201
    line.close()


def connection(azurite: Azurite) -> Any:
    """A workspace whose datastores are all in the emulator."""
    facts = SimpleNamespace(
        container_name=CONTAINER,
        account_name=ACCOUNT,
        protocol="https",
        endpoint=azurite.domain,
        credentials=SimpleNamespace(account_key=KEY),
    )
    get = lambda name, include_secrets: facts  # noqa: E731
    return SimpleNamespace(client=SimpleNamespace(datastores=SimpleNamespace(get=get)))


def test_names_are_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places, address = Places(tmp_path), f"azureml://datastores/x/paths/{FOLDER}"
    azurite, here = Azurite(places, tmp_path / "azurite"), tmp_path / "a/b/here"
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(places.certificate))
    find = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **rest: find("127.0.0.1", *more))
    try:
        workspace = connection(azurite)
        here.mkdir(parents=True)
        (tmp_path / "target").mkdir()
        (here / "link").symlink_to(tmp_path / "target")
        for name in (*GOOD, *BAD):
            put(azurite, f"{FOLDER}/{name}", name.encode())
        with azurite.service().get_container_client(CONTAINER) as container:
            container.upload_blob(f"{FOLDER}/attempts", b"", metadata={"hdi_isfolder": "true"})
        assert datastore.fetch(workspace, address, here) == len(GOOD)
        assert datastore.fetch(workspace, address, here) == 0
        sent = {"checkpoints/a b.ckpt": here / "config.yaml", "new": here / "config.yaml"}
        assert datastore.send(workspace, address, sent) == 1
        with pytest.raises(UserError, match=r"nothing is in .*elsewhere yet"):
            datastore.fetch(workspace, "azureml://datastores/x/paths/elsewhere", here)
    finally:
        azurite.close()
    files = {p.relative_to(here).as_posix() for p in here.rglob("*") if p.is_file()}
    assert files == {*GOOD}
    assert not [*tmp_path.rglob("outside")] and not [*(tmp_path / "target").iterdir()]
    said = capsys.readouterr().err
    assert [name for name in BAD if f"left out   {name!a}: " not in said] == []
