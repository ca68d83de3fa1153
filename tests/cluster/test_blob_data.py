"""A real blob server (Azurite): stores, connections that break, a server that is gone."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from distdl.data import StoredImages, TrainPosition
from distdl.data.loading import distribute
from distdl.datasets import reading
from distdl.datasets.format import MANIFEST
from distdl.datasets.reading import open_data_set
from distdl.stores import StoreError, open_store
from distdl.stores import remote as remote_module
from tests.cluster.azurite import ACCOUNT, CONTAINER, KEY, Azurite, Places, connection, free_port
from tests.prepared import prepare, refusal

pytestmark = pytest.mark.skipif(
    shutil.which("azurite-blob") is None, reason="not installed: npm install -g azurite"
)
STRING = "AZURE_STORAGE_CONNECTION_STRING"


class Line(socketserver.ThreadingTCPServer):
    """A connection to a server's port. The first `breaks` connections end early: every second one
    after `after` bytes of its responses, the others before the first byte."""

    daemon_threads, block_on_close = True, False

    def __init__(self, to: int, breaks: int = 0, after: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.port, self.broken = self.server_address[1], 0
        self._to, self._breaks, self._after = to, breaks, after
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def finish_request(self, near: Any, address: Any) -> None:
        passed = 0
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as far:
            threading.Thread(target=self._copy, args=(near, far), daemon=True).start()
            while data := far.recv(16384):
                passed += len(data)
                after = self._after if self.broken % 2 else 0
                if passed > after and self.broken < self._breaks:
                    self.broken += 1
                    return
                near.sendall(data)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(16384):
                target.sendall(data)

    def close(self) -> None:
        self.shutdown()
        self.server_close()


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    folder = tmp_path_factory.mktemp("azurite")
    places = Places(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REQUESTS_CA_BUNDLE", str(places.certificate))
        patch.setenv("NO_PROXY", "127.0.0.1")
        for name in [name for name in os.environ if name.startswith("AZURE_")]:
            patch.delenv(name)
        server = Azurite(places, folder / "data")
        yield server
    server.close()


@pytest.fixture
def account(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(STRING, connection(azurite.port))
    return f"azure://{azurite.new_container()}/images"


def test_files_are_stored_once_and_read_back(azurite, account, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_module, "PART", 1 << 18)
    store, data, back = open_store(account, patience=5), os.urandom(2_345_678), tmp_path / "back"
    (tmp_path / "source").write_bytes(data)
    sent: list[int] = []
    received: list[int] = []
    store.upload(tmp_path / "source", "a/b.tar", sent.append)
    store.download("a/b.tar", back, received.append)
    assert back.read_bytes() == data and sum(sent) == sum(received) == len(data)
    assert list(store.names()) == ["a/b.tar"] and list(store.names("b")) == []
    assert store.size("a/b.tar") == len(data) and store.size("a/c.tar") is None
    with pytest.raises(StoreError, match="exists already"):
        store.upload(tmp_path / "source", "a/b.tar")
    with pytest.raises(StoreError, match=rf"{account} has no a/c.tar"):
        store.read("a/c.tar")
    client = store.client

    def child() -> None:  # has a client of its own
        assert store.read("a/b.tar") == data and store.client is not client

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    # Connections that break are made again.
    back.unlink()
    line = Line(azurite.port, breaks=9, after=100_000)
    monkeypatch.setenv(STRING, connection(line.port))
    open_store(account, patience=30).download("a/b.tar", back)
    assert back.read_bytes() == data and line.broken == 9
    line.close()
    with pytest.raises(StoreError) as error:
        open_store(account, patience=0.5).download("a/b.tar", back)
    assert error.value.transient


def test_a_signature_opens_and_is_never_shown(azurite, account, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("content")
    open_store(account).upload(tmp_path / "file", "file")
    container = account.split("/")[2]
    monkeypatch.delenv(STRING)
    base = f"https://127.0.0.1:{azurite.port}/{ACCOUNT}/{container}/images"
    assert open_store(f"{base}?{azurite.sas(container)}").read("file") == b"content"
    foreign = azurite.sas(CONTAINER)
    texts = [repr(open_store(f"{base}?{foreign}"))]
    gone = base.replace(str(azurite.port), str(free_port()))
    for uri, transient in ((base, False), (gone, True)):
        with pytest.raises(StoreError, match=uri) as error:
            open_store(f"{uri}?{foreign}", patience=0.5).read("file")
        assert error.value.transient == transient
        texts.append(str(error.value))
    for text in texts:
        assert foreign.partition("sig=")[2][:20] not in text
        assert "sig=" not in text.replace("sig=***", "")


def test_absence_and_a_wrong_key_have_remedies_of_their_own(account, monkeypatch):
    def remedy(uri: str) -> str:
        return refusal(open_data_set, uri).remedy

    assert "prepare ... --upload URL" in remedy(account)
    assert "az storage container create --name nosuchbox" in remedy("azure://nosuchbox/images")
    monkeypatch.setenv(STRING, os.environ[STRING].replace(KEY, "d3Jvbmc="))
    assert "docs/data/reading" in remedy(account)


def test_a_kept_manifest_replaces_a_server_that_is_gone(azurite, account, tmp_path, monkeypatch):
    """test_imagenet_end_to_end.py continues a training without its server."""
    monkeypatch.setattr(reading, "QUICK", 0.5)
    manifest, cache = prepare(tmp_path / "prepared"), tmp_path / "cache"
    azurite.upload(account.removeprefix("azure://"), tmp_path / "prepared")
    line = Line(azurite.port)
    monkeypatch.setenv(STRING, connection(line.port))

    def run() -> None:
        data = StoredImages(account, 4, 10, 16, num_workers=0, cache_dir=str(cache))
        distribute(data, rank=0, world_size=1, seed=3, position=TrainPosition())
        data.setup()
        assert sum(len(batch["index"]) for batch in data.train_dataloader()) == 40
        assert sum(float(batch["weight"].sum()) for batch in data.val_dataloader()) == 7
        data.teardown()

    run()
    (kept,) = (cache / "manifests").iterdir()
    kept.write_text("{}")  # not used while the server responds
    assert open_data_set(account, cache_root=cache).manifest == manifest
    open_data_set(account).keep(cache)
    line.close()
    node = {"root": account, "num_classes": 11, "cache_dir": str(cache)}
    note, problem = StoredImages.check(node)
    assert note.startswith(f"{account} cannot be reached; the copy of 20") and "11" in problem.what
    run()
    elsewhere = refusal(open_data_set, account, patience=0.5, cache_root=tmp_path / "elsewhere")
    assert elsewhere.path == "data.root" and f"{account}/{MANIFEST}" in elsewhere.what
