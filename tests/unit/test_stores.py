"""Stores: addresses, a folder, S3 (moto's server). Azure: tests/cluster/test_azurite.py."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from typing import Any

import pytest
from azure.core.exceptions import ServiceRequestError

from distdl.datasets.format import MANIFEST
from distdl.datasets.reading import open_data_set
from distdl.stores import Store, StoreError, is_remote, open_store
from distdl.stores import remote as remote_module
from distdl.stores.files import FileStore
from tests.prepared import Unreliable, prepare, refusal

STRING, ACCOUNT, KEY, SAS = (
    f"AZURE_STORAGE_{name}" for name in ("CONNECTION_STRING", "ACCOUNT", "KEY", "SAS_TOKEN")
)
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_account(monkeypatch):
    for name in (STRING, ACCOUNT, KEY, SAS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_addresses_of_folders(tmp_path):
    assert open_store(str(tmp_path)) == open_store(f"file://{tmp_path}") == FileStore(tmp_path)
    assert open_store("file:///a%20b").uri == "/a b"
    assert open_store("~/x").uri == os.path.expanduser("~/x")
    assert not any(map(is_remote, ("images", "/a/b", "C:/images", "file:///a/b")))
    assert all(map(is_remote, ("azure://c/p", "abfss://c@a.dfs.core.windows.net/p", "s3://b")))


@pytest.mark.parametrize(
    ("uri", "blob"),
    [
        ("azure://box/a/b", "https://mine.blob.core.windows.net/box/a/b"),
        ("az://box", "https://mine.blob.core.windows.net/box"),
        ("abfss://box@me.dfs.core.windows.net/a/b/", "https://me.blob.core.windows.net/box/a/b"),
        ("https://me.blob.core.usgovcloudapi.net/box/a?sig=x", ""),
        ("http://127.0.0.1:10000/devstoreaccount1/box/a?sig=x", ""),
    ],
)
def test_addresses_of_azure(uri, blob, monkeypatch):
    def get(self: Any, key: str) -> None:
        raise LookupError(f"{self.url.partition('?')[0]}/{key}")

    monkeypatch.setattr("azure.storage.blob.ContainerClient.get_blob_client", get)
    monkeypatch.setenv(ACCOUNT, "mine")
    monkeypatch.setenv(KEY, "a2V5")
    with pytest.raises(LookupError, match=f"^{blob or uri[:-6]}/file$"):
        open_store(uri).size("file")


@pytest.mark.parametrize(
    ("uri", "what"),
    [
        ("ftp://host/a", "address of an unknown form"),
        ("https://example.org/a?sig=verysecret", "not an address of Azure Blob"),
        ("azure://", "names no container"),
        ("s3://", "names no bucket"),
        ("azure://box/a", f"names no account, and neither {STRING}"),
        ("", "the address is empty"),
    ],
)
def test_addresses_that_are_refused(uri, what):
    problem = refusal(open_store, uri)
    assert what in problem.what and problem.path == uri.partition("?")[0] and problem.remedy
    assert "secret" not in str(problem)


@pytest.fixture(scope="module")
def s3():
    """moto's server: a real one over HTTP, and an account that opens nothing else."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("NO_PROXY", host)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import boto3

        boto3.client("s3").create_bucket(Bucket="box")
        yield server
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path, monkeypatch) -> Store:
    if request.param == "folder":
        return open_store(str(tmp_path / "kept" / "images"))
    monkeypatch.delenv("NO_PROXY")
    request.getfixturevalue("s3")
    return open_store(f"s3://box/{tmp_path.name}/images", patience=2)


def test_files_are_stored_once_and_read_back(store, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_module, "PART", 100_000)
    source, back, data = tmp_path / "source", tmp_path / "back", os.urandom(1_234_567)
    source.write_bytes(data)
    sent: list[int] = []
    received: list[int] = []
    for action in (store.read, lambda name: store.download(name, back)):
        with pytest.raises(StoreError, match=r"a/b.tar") as error:
            action("a/b.tar")
        assert not error.value.transient
    assert list(store.names()) == []
    store.upload(source, "a/b.tar", sent.append)
    (tmp_path / "empty").touch()
    store.upload(tmp_path / "empty", "nothing")
    back.write_bytes(bytes(2_000_000))  # longer than the file
    pickle.loads(pickle.dumps(store)).download("a/b.tar", back, received.append)
    assert back.read_bytes() == data and sum(sent) == sum(received) == len(data)
    assert store.size("a/b.tar") == len(data) and store.size("a") is None
    assert list(store.names()) == ["a/b.tar", "nothing"] and list(store.names("a/")) == ["a/b.tar"]
    with pytest.raises(StoreError, match="exists already"):
        store.upload(tmp_path / "empty", "a/b.tar")
    assert store.read("a/b.tar") == data and store.read("nothing") == b""


def test_an_interrupted_upload_leaves_nothing(store, tmp_path):
    def interrupt(count: int) -> None:
        if count:
            raise KeyboardInterrupt

    (tmp_path / "source").write_bytes(bytes(9 << 20))
    with pytest.raises(KeyboardInterrupt):
        store.upload(tmp_path / "source", "file", interrupt)
    assert list(store.names()) == [] and not any(tmp_path.glob("kept/images/*"))


@pytest.mark.parametrize("size", [1000, 9 << 20])  # as one object, and in parts
def test_of_two_uploads_at_once_one_is_kept(store, tmp_path, size):
    """Both have looked, and found nothing of that name."""
    both, first, results = threading.Barrier(2, timeout=200), threading.Event(), dict[str, str]()

    def send(name: str) -> None:
        met: list[int] = []

        def meet(count: int = 0) -> None:
            if not met:
                met.append(both.wait())
                if name == "2":  # moto looks and stores in two steps
                    first.wait()

        (tmp_path / name).write_bytes(name.encode() * size)
        try:
            store.upload(tmp_path / name, "file", meet)
        except StoreError as error:
            results[name] = str(error)
        first.set()

    threads = [threading.Thread(target=send, args=(name,)) for name in "12"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"2": f"{store.uri}/file exists already"}
    assert store.read("file") == b"1" * size and list(store.names()) == ["file"]


@pytest.mark.parametrize("size", [1000, 9 << 20])
def test_a_response_that_is_lost_does_not_fail_an_upload(s3, tmp_path, size, monkeypatch):
    from botocore.exceptions import ReadTimeoutError

    store = open_store(f"s3://box/{tmp_path.name}", patience=20)
    (tmp_path / "one").write_bytes(bytes(size))
    calls = ["put_object", "complete_multipart_upload"]

    def losing(real: Any) -> Any:
        def call(**options: Any) -> Any:
            response = real(**options)
            if calls:
                calls.clear()
                raise ReadTimeoutError(endpoint_url="x")
            return response

        return call

    for name in calls:
        monkeypatch.setattr(store.client, name, losing(getattr(store.client, name)))
    store.upload(tmp_path / "one", "file")
    assert not calls and store.size("file") == size


def test_an_address_tells_accounts_apart(monkeypatch):
    monkeypatch.setenv(KEY, "a2V5")
    addresses = []
    for account in ("one", "two"):
        monkeypatch.setenv(ACCOUNT, account)
        addresses.append(open_store("azure://box/a").address)
    monkeypatch.setenv(SAS, "sv=1&sig=secret")
    monkeypatch.delenv(KEY)
    assert open_store("azure://box/a").address == addresses[1] != addresses[0]
    assert addresses[0] == "https://one.blob.core.windows.net/box azure://box/a"


def test_a_kept_manifest_is_of_one_server(s3, tmp_path, monkeypatch):
    prepare(tmp_path / "far")
    uri, cache = "s3://box/kept", tmp_path / "cache"
    open_store(uri, patience=2).upload(tmp_path / "far" / MANIFEST, MANIFEST)
    open_data_set(uri, cache_root=cache).keep(cache)
    (kept,) = (cache / "manifests").iterdir()
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOWHERE)  # another one, with the same bucket
    with pytest.raises(StoreError, match=f"{uri}/{MANIFEST}") as error:
        open_store(uri, patience=0.5).read(MANIFEST)
    assert error.value.transient
    assert refusal(open_data_set, uri, patience=0.1, cache_root=cache).path == "data.root"
    assert kept.read_bytes() == (tmp_path / "far" / MANIFEST).read_bytes()


def test_each_outage_is_logged_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(remote_module.time, "sleep", lambda seconds: None)
    (tmp_path / "file").write_text("content")
    answers = iter("--ok--ok")

    def answer() -> None:
        if next(answers) == "-":
            raise ConnectionError("reset")

    store = Unreliable(tmp_path, answer)
    for _ in range(4):
        assert store.read("file") == b"content"
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["box://data does not answer, trying again for 120 s: reset"] * 2


def test_connection_strings_are_checked_and_requests_not_logged(monkeypatch):
    for text in ("AccountKey=verysecret", "verysecret"):
        monkeypatch.setenv(STRING, text)
        problem = refusal(open_store("azure://box/a").read, "file")
        assert STRING in problem.what and problem.remedy and "secret" not in str(problem)
    sdk = logging.getLogger("azure")
    monkeypatch.setattr(sdk, "level", logging.NOTSET)
    monkeypatch.setenv(STRING, "AccountName=me;AccountKey=a2V5")
    assert open_store("azure://box").client and sdk.level == logging.WARNING
    assert not logging.getLogger("azure.identity").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize(
    ("uri", "variables", "remedy"),
    [
        ("s3://box/nothing", {}, "prepare ... --upload URL"),
        ("s3://nobox/data", {}, "create the bucket (aws s3 mb s3://nobox)"),
        ("s3://box/nothing", {"AWS_ACCESS_KEY_ID": None}, "export AWS_ACCESS_KEY_ID="),
        ("azure://box/data", {ACCOUNT: "me", KEY: "cut"}, "is not an account key"),
    ],
)
def test_refused_requests_come_with_a_remedy(uri, variables, remedy, s3, monkeypatch):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in variables.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    assert remedy in refusal(open_data_set, uri, patience=0).remedy


def test_a_waiting_download_can_be_given_up(tmp_path, monkeypatch):
    store = Unreliable(tmp_path, lambda: None)
    (tmp_path / "file").write_bytes(bytes(10))
    monkeypatch.setattr(store, "_range", lambda *_: b"short")  # truncated each time
    calls: list[int] = []

    def give_up(count: int) -> None:
        calls.append(count)
        if len(calls) > 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        store.download("file", tmp_path / "to", give_up)
    assert calls == [0, 0, 0]  # no byte of it was taken for the file's


def test_a_signature_is_never_shown():
    store = open_store("https://me.blob.core.windows.net/box?sig=verysecret", patience=0)

    def fails() -> None:
        raise ServiceRequestError("no answer from /box/file?sv=1&sig=verysecret&se=2")

    with pytest.raises(StoreError, match="no answer") as error:
        store.retried("file", fails)
    assert "secret" not in str(error.value) + store.uri + repr(store) + store.address
