"""A real blob server (Azurite): stores, connections that break, a server that is gone; `jobs fetch`
of names that lead out of the run; the shared link of `provision azureml sas`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import multiprocessing
import os
import shutil
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import HttpResponseError
from azure.storage.blob import BlobServiceClient, ContainerClient

from distdl.data import StoredImages, TrainPosition
from distdl.data.loading import distribute
from distdl.datasets import reading
from distdl.datasets.format import MANIFEST
from distdl.datasets.reading import open_data_set
from distdl.launchers.azureml import datastore
from distdl.launchers.azureml.provision import sas
from distdl.stores import StoreError, open_store
from distdl.stores import remote as remote_module
from tests.cluster.arm_store import TENANT
from tests.cluster.azurite import ACCOUNT, CONTAINER, KEY, Azurite, Places, connection, free_port
from tests.prepared import prepare, refusal

pytestmark = [
    pytest.mark.skipif(shutil.which("azurite-blob") is None, reason="npm install -g azurite"),
    pytest.mark.xdist_group("azurite"),
]
STRING = "AZURE_STORAGE_CONNECTION_STRING"
FOLDER = "distdl/e/run"
GOOD = ("config.yaml", "attempts/001/status.json", "checkpoints/a b.ckpt")
BAD = ("../outside", "a/../../outside", "link/x", "C:/outside", "a//b")
USER = "12121212-3434-5656-7878-909090909090"


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
        server = Azurite(places, folder / "data", "--oauth", "basic")
        yield server
    server.close()


@pytest.fixture
def any_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each host name this machine's."""
    find = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **rest: find("127.0.0.1", *more))


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
    with azurite.service().get_container_client(account.split("/")[2]) as container:
        container.upload_blob("images/a", b"", metadata={"hdi_isfolder": "true"})  # by a mount
    store.download("a/b.tar", back, received.append)
    assert back.read_bytes() == data and sum(sent) == sum(received) == len(data)
    assert list(store.names()) == ["a/b.tar"] and list(store.names("b")) == []
    assert store.size("a/b.tar") == len(data) and store.size("a/c.tar") is None
    with pytest.raises(StoreError, match="exists already"):
        store.upload(tmp_path / "source", "a/b.tar")
    with pytest.raises(StoreError, match=rf"{account} has no a/c.tar"):
        store.read("a/c.tar")
    (tmp_path / "other").write_text("other")

    def overtake(count: int) -> None:
        if store.size("c.tar") is None:
            store.upload(tmp_path / "other", "c.tar")

    with pytest.raises(StoreError, match=r"c\.tar"):
        store.upload(tmp_path / "source", "c.tar", overtake)
    assert store.read("c.tar") == b"other"
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


def test_absence_comes_with_a_remedy(account):
    assert "prepare ... --upload URL" in refusal(open_data_set, account).remedy
    remedy = refusal(open_data_set, "azure://nosuchbox/images").remedy
    assert "az storage container create --name nosuchbox" in remedy


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


def test_names_are_not_trusted(
    azurite: Azurite, any_host: None, tmp_path: Path, capsys: Any
) -> None:
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


def test_the_link_reads_and_lists_and_does_nothing_else(
    azurite: Azurite, any_host: None, capsys: Any
) -> None:
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
