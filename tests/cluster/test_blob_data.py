"""Training data in Azure Blob: a real Azurite, connections that break, a server that goes away."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from distdl.data import StoredImages, TrainPosition
from distdl.data.loading import distribute
from distdl.datasets import reading
from distdl.datasets.reading import open_data_set
from distdl.stores import StoreError, open_store
from distdl.stores import remote as remote_module
from distdl.util.errors import UserError
from tests.cluster.azurite import ACCOUNT, CONTAINER, KEY, Azurite, Places, free_port
from tests.prepared import prepare

pytestmark = pytest.mark.skipif(
    shutil.which("azurite-blob") is None, reason="not installed: npm install -g azurite"
)


class Line:
    """A connection to a server that breaks when told to.

    Args:
        port: Of the server.
        breaks: How many connections end: every second one after `after` bytes of its answers, the
            others before the first.
    """

    def __init__(self, port: int, breaks: int, after: int) -> None:
        self.port, self.broken = free_port(), 0
        self._to, self._breaks, self._after = port, breaks, after
        self._listening = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:  # closed
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            for source, target, answers in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._pass, args=(source, target, answers))
                thread.daemon = True
                thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        passed = 0
        try:
            while data := source.recv(16384):
                passed += len(data)
                after = self._after if self.broken % 2 else 0
                if answers and passed > after and self.broken < self._breaks:
                    self.broken += 1
                    break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # closing alone does not wake `accept`
        self._listening.close()


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
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection(azurite.port))
    return f"azure://{azurite.new_container()}/images"


def connection(port: int) -> str:
    endpoint = f"https://127.0.0.1:{port}/{ACCOUNT}"
    return f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint}"


def test_what_goes_in_comes_out(account, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_module, "PART", 1 << 18)
    store, data = open_store(account, patience=5), os.urandom(2_345_678)
    (tmp_path / "source").write_bytes(data)
    sent: list[int] = []
    came: list[int] = []
    store.upload(tmp_path / "source", "a/b.tar", sent.append)
    store.download("a/b.tar", tmp_path / "back", came.append)
    assert (tmp_path / "back").read_bytes() == data and sum(sent) == sum(came) == len(data)
    assert list(store.names()) == ["a/b.tar"] and list(store.names("b")) == []
    assert store.size("a/b.tar") == len(data) and store.size("a/c.tar") is None
    with pytest.raises(StoreError, match=r"a/b.tar exists already"):
        store.upload(tmp_path / "source", "a/b.tar")
    with pytest.raises(StoreError, match=rf"{account} has no a/c.tar"):
        store.read("a/c.tar")


def test_each_process_has_a_client_of_its_own(account, tmp_path):
    (tmp_path / "file").write_text("content")
    store = open_store(account, patience=5)
    store.upload(tmp_path / "file", "file")

    def child() -> None:
        inherited = store._client
        assert store.read("file") == b"content" and store._client is not inherited

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0


def test_a_signature_opens_and_is_never_shown(azurite, account, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("content")
    open_store(account).upload(tmp_path / "file", "file")
    container = account.split("/")[2]
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    base = f"https://127.0.0.1:{azurite.port}/{ACCOUNT}/{container}/images"
    assert open_store(f"{base}?{azurite.sas(container)}").read("file") == b"content"
    foreign = azurite.sas(CONTAINER)
    store = open_store(f"{base}?{foreign}", patience=1)
    with pytest.raises(StoreError, match=base) as refused:
        store.read("file")
    assert not refused.value.transient
    azurite_gone = base.replace(str(azurite.port), str(free_port()))
    with pytest.raises(StoreError) as gone:
        open_store(f"{azurite_gone}?{foreign}", patience=0.5).read("file")
    assert gone.value.transient
    signature = foreign.partition("sig=")[2][:20]
    for said in (str(refused.value), str(gone.value), repr(store), store.uri):
        assert signature not in said and "sig=" not in said.replace("sig=***", "")


def test_an_absent_container_and_a_wrong_key_have_their_own_remedies(account, monkeypatch):
    with pytest.raises(UserError, match=r"has no dataset\.json\n.*prepare \.\.\. --upload URL"):
        open_data_set(account)
    with pytest.raises(UserError, match=r"az storage container create --name nosuchbox"):
        open_data_set("azure://nosuchbox/images")
    told = os.environ["AZURE_STORAGE_CONNECTION_STRING"].replace(KEY, "d3Jvbmc=")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", told)
    with pytest.raises(UserError, match="what opens it: docs/data/reading"):
        open_data_set(account)


def test_connections_that_break_are_made_again(azurite, account, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_module, "PART", 1 << 18)
    data = os.urandom(3_000_000)
    (tmp_path / "source").write_bytes(data)
    open_store(account).upload(tmp_path / "source", "shard.tar")
    line = Line(azurite.port, breaks=9, after=100_000)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection(line.port))
    open_store(account, patience=30).download("shard.tar", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data and line.broken == 9
    line.close()
    with pytest.raises(StoreError, match=rf"{account}/shard.tar") as error:
        open_store(account, patience=1).download("shard.tar", tmp_path / "back")
    assert error.value.transient


def images(uri: str, cache: Path, rank: int) -> StoredImages:
    data = StoredImages(uri, 4, 10, 16, num_workers=1, cache_dir=str(cache), shuffle_window=2)
    distribute(data, rank=rank, world_size=2, seed=3, position=TrainPosition())
    data.setup()
    return data


def test_trained_from_and_then_without_the_server(tmp_path, monkeypatch):
    """Two ranks of a node, workers that fork, one cache; the server ends after the first epoch."""
    places = Places(tmp_path)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(places.certificate))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Azurite(places, tmp_path / "data")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection(server.port))
    manifest = prepare(tmp_path / "prepared")
    server.upload(f"{CONTAINER}/images", tmp_path / "prepared")
    uri = f"azure://{CONTAINER}/images"
    assert open_data_set(uri).manifest == manifest
    ranks = [images(uri, tmp_path / "cache", rank) for rank in range(2)]
    trains = [rank.train_dataloader() for rank in ranks]
    vals = [rank.val_dataloader() for rank in ranks]
    for epoch in range(3):
        seen: list[int] = []
        for train in trains:
            train.batch_sampler.position = TrainPosition(epoch, 0)
            for batch in train:
                assert (batch["label"] == batch["index"] % 10).all()
                seen += batch["index"].tolist()
        assert sorted(seen) == list(range(40))
        weights = [float(b["weight"].sum()) for val in vals for b in val]
        assert sum(weights) == 7
        if epoch == 0:
            monkeypatch.setattr(reading, "QUICK", 0.5)
            kept = list((tmp_path / "cache" / "manifests").iterdir())
            kept[0].write_text("{}")
            assert open_data_set(uri, cache_root=tmp_path / "cache").manifest == manifest
            open_data_set(uri).keep(tmp_path / "cache")
            server.close()
    # A new run, and what is checked before one: the kept manifest, and a note of it.
    node = {"root": uri, "num_classes": 11, "cache_dir": str(tmp_path / "cache")}
    note, problem = StoredImages.check(node)
    assert note.startswith(f"{uri} cannot be reached; the copy of 20") and "11" in problem.what
    again = images(uri, tmp_path / "cache", 0)
    assert again.train_dataloader().batch_sampler is not None
    assert sum(len(batch["index"]) for batch in again.train_dataloader()) == 20
    again.teardown()
    with pytest.raises(UserError, match=rf"{uri}/dataset.json"):
        open_data_set(uri, patience=0.5, cache_root=tmp_path / "elsewhere")
    for rank in ranks:
        rank.teardown()
    # A loader's workers end with it, and not with the process (where they take a minute).
    del ranks, trains, vals, train, batch
    gc.collect()
