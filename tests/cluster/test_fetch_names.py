"""`jobs fetch` from a real Azurite: blobs whose names lead out, or through a link, stay there."""

from __future__ import annotations

import http.client
import shutil
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from distdl.launchers.azureml.store import Store
from tests.cluster.azurite import ACCOUNT, CONTAINER, Azurite, Places

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


class Emulated(Store):
    """Its container is the emulator's; there is no workspace to ask for it."""

    def __init__(self, azurite: Azurite) -> None:
        super().__init__(None, f"azureml://datastores/x/paths/{FOLDER}")  # type: ignore[arg-type]
        self.azurite = azurite

    def container(self) -> Any:
        return self.azurite.service().get_container_client(CONTAINER)


def test_names_are_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    azurite = Azurite(Places(tmp_path), tmp_path / "azurite")
    try:
        store, here = Emulated(azurite), tmp_path / "a/b/here"
        here.mkdir(parents=True)
        (tmp_path / "target").mkdir()
        (here / "link").symlink_to(tmp_path / "target")
        with store.container() as container:
            for name in (*GOOD, *BAD):
                put(azurite, f"{FOLDER}/{name}", name.encode())
            container.upload_blob(f"{FOLDER}/attempts", b"", metadata={"hdi_isfolder": "true"})
        assert store.fetch(here) == len(GOOD)
        assert store.fetch(here) == 0
    finally:
        azurite.close()
    found = {p.relative_to(here).as_posix() for p in here.rglob("*") if p.is_file()}
    assert found == {*GOOD}
    assert not [*tmp_path.rglob("outside")] and not [*(tmp_path / "target").iterdir()]
    said = capsys.readouterr().err
    assert [name for name in BAD if f"left out   {name!a}: " not in said] == []
