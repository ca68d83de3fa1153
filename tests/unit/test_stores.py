"""Stores: addresses, a folder, S3 (moto's server); Azure is in tests/cluster/test_blob_data.py."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from distdl.datasets.format import MANIFEST
from distdl.datasets.reading import open_data_set
from distdl.stores import Store, StoreError, is_remote, open_store
from distdl.stores import remote as remote_module
from distdl.stores.files import FileStore
from distdl.util.errors import UserError
from tests.prepared import prepare

CREDENTIALS = ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY")


@pytest.fixture(autouse=True)
def no_account(monkeypatch):
    for name in (*CREDENTIALS, "AZURE_STORAGE_SAS_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("uri", "remote"),
    [
        *(("images", False), ("/a/b", False), ("C:/images", False), ("file:///a/b", False)),
        *(("azure://c/p", True), ("abfss://c@a.dfs.core.windows.net/p", True), ("s3://b", True)),
    ],
)
def test_what_lies_behind_a_network(uri, remote):
    assert is_remote(uri) is remote


def test_a_folder_by_path_and_by_uri(tmp_path):
    assert open_store(str(tmp_path)) == open_store(f"file://{tmp_path}") == FileStore(tmp_path)
    assert open_store("file:///a%20b").uri == "/a b"
    assert open_store("~/x").uri == os.path.expanduser("~/x")


@pytest.mark.parametrize(
    ("uri", "account", "endpoint", "container", "folder"),
    [
        ("azure://box/a/b", "", "", "box", "a/b"),
        (
            "abfss://box@me.dfs.core.windows.net/a/b/",
            *("me", "https://me.blob.core.windows.net", "box", "a/b"),
        ),
        (
            "https://me.blob.core.usgovcloudapi.net/box/a?sig=x",
            *("me", "https://me.blob.core.usgovcloudapi.net", "box", "a"),
        ),
        (
            "http://127.0.0.1:10000/devstoreaccount1/box/a",
            *("devstoreaccount1", "http://127.0.0.1:10000/devstoreaccount1", "box", "a"),
        ),
    ],
)
def test_addresses_of_azure(uri, account, endpoint, container, folder, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    store = open_store(uri)
    found = (store._account, store._endpoint, store._container, store._folder)
    assert found == (account, endpoint, container, folder)


def test_a_signature_is_never_shown():
    store = open_store("https://me.blob.core.windows.net/box/a?sv=1&sig=verysecret")
    assert store._sas == "sv=1&sig=verysecret"
    assert "secret" not in store.uri + repr(store) + str(store)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("ftp://host/a", "form that is not understood"),
        ("https://example.org/a?sig=verysecret", "not an address of Azure Blob"),
        ("azure://", "names no container"),
        ("s3://", "names no bucket"),
        ("azure://box/a", "names no account, and neither AZURE_STORAGE_CONNECTION_STRING"),
    ],
)
def test_addresses_that_are_refused(uri, said):
    with pytest.raises(UserError, match=said) as refused:
        open_store(uri)
    assert "secret" not in str(refused.value) and refused.value.problems[0].remedy


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
def store(request, tmp_path) -> Store:
    if request.param == "folder":
        return open_store(str(tmp_path / "kept" / "images"))
    request.getfixturevalue("s3")
    return open_store(f"s3://box/{tmp_path.name}/images", patience=2)


def test_what_goes_in_comes_out(store, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_module, "PART", 100_000)
    data = os.urandom(1_234_567)
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(data)
    sent: list[int] = []
    came: list[int] = []
    store.upload(source, "a/b.tar", sent.append)
    (tmp_path / "empty").touch()
    store.upload(tmp_path / "empty", "nothing")
    back.write_bytes(bytes(2_000_000))  # longer than what comes
    again = pickle.loads(pickle.dumps(store))
    again.download("a/b.tar", back, came.append)
    assert back.read_bytes() == data and sum(sent) == sum(came) == len(data)
    assert store.size("a/b.tar") == len(data) and store.size("a") is None
    assert store.read("a/b.tar") == data and store.read("nothing") == b""
    assert list(store.names()) == ["a/b.tar", "nothing"] and list(store.names("a/")) == ["a/b.tar"]


def test_nothing_is_replaced(store, tmp_path):
    (tmp_path / "one").write_text("one")
    (tmp_path / "two").write_text("two")
    store.upload(tmp_path / "one", "file")
    with pytest.raises(StoreError, match="file exists already"):
        store.upload(tmp_path / "two", "file")
    assert store.read("file") == b"one"


@pytest.mark.parametrize("size", [1000, 9 << 20])  # as one object, and in parts
def test_of_two_uploads_at_once_one_is_kept(store, tmp_path, size):
    """Both have looked, and found nothing of that name."""
    (tmp_path / "one").write_bytes(b"1" * size)
    (tmp_path / "two").write_bytes(b"2" * size)
    both = threading.Barrier(2, timeout=200)
    met: list[str] = []
    said: list[str] = []

    def meet(count: int = 0) -> None:
        name = threading.current_thread().name
        if name in ("one", "two") and name not in met:
            met.append(name)
            both.wait()
            if name == "two":  # moto looks and stores in two steps
                threads[0].join()

    def send(name: str) -> None:
        try:
            store.upload(tmp_path / name, "file", meet)
            said.append(name)
        except StoreError as error:
            said.append(str(error))

    threads = [threading.Thread(target=send, args=(n,), name=n) for n in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["one", f"{store.uri}/file exists already"]
    assert store.read("file") == (tmp_path / "one").read_bytes()
    assert list(store.names()) == ["file"]


@pytest.mark.parametrize("size", [1000, 9 << 20])
def test_an_answer_that_is_lost_does_not_fail_an_upload(s3, tmp_path, size, monkeypatch):
    from botocore.exceptions import ReadTimeoutError

    store = open_store(f"s3://box/{tmp_path.name}", patience=20)
    (tmp_path / "one").write_bytes(bytes(size))
    answers = ["put_object", "complete_multipart_upload"]

    def losing(real: Any) -> Any:
        def call(**given: Any) -> Any:
            found = real(**given)
            if answers:
                answers.clear()
                raise ReadTimeoutError(endpoint_url="x")
            return found

        return call

    for name in answers:
        monkeypatch.setattr(store.client, name, losing(getattr(store.client, name)))
    store.upload(tmp_path / "one", "file")
    assert not answers and store.size("file") == size


def test_what_is_absent_is_named(store, tmp_path):
    for action in (store.read, lambda name: store.download(name, tmp_path / "to")):
        with pytest.raises(StoreError, match=r"absent.tar") as error:
            action("absent.tar")
        assert not error.value.transient
    assert list(store.names()) == []


def test_a_killed_upload_to_a_folder_leaves_no_file_of_that_name(tmp_path):
    source, kept = tmp_path / "source", FileStore(tmp_path / "kept")
    source.write_bytes(bytes(100))

    def dies(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.upload(source, "file", dies)
    assert list(kept.names()) == [] and not any(Path(kept.uri).iterdir())


def test_a_server_that_is_gone_is_waited_for_and_then_named(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(StoreError, match="s3://box/a/file") as error:
        open_store("s3://box/a", patience=1).read("file")
    assert error.value.transient


def test_an_address_tells_accounts_apart(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_KEY", "a2V5")
    found = []
    for account in ("one", "two"):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", account)
        found.append(open_store("azure://box/a").address)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=secret")
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    assert open_store("azure://box/a").address == found[1] != found[0]
    assert found[0] == "https://one.blob.core.windows.net/box azure://box/a"


def test_a_kept_manifest_is_of_one_server(s3, tmp_path, monkeypatch):
    prepare(tmp_path / "far")
    uri, cache = "s3://box/kept", tmp_path / "cache"
    open_store(uri, patience=2).upload(tmp_path / "far" / MANIFEST, MANIFEST)
    open_data_set(uri, cache_root=cache).keep(cache)
    (kept,) = (cache / "manifests").iterdir()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(UserError, match="Could not connect"):  # another one, of the same bucket
        open_data_set(uri, patience=0.1, cache_root=cache)
    assert kept.read_bytes() == (tmp_path / "far" / MANIFEST).read_bytes()


def test_the_first_try_in_vain_is_said_once(monkeypatch, caplog):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "x")
    monkeypatch.setattr(remote_module.time, "sleep", lambda seconds: None)
    store = open_store("azure://box/a")
    answers = iter("--ok--ok")

    def action() -> str:
        if (answer := next(answers)) == "-":
            raise remote_module.Short("cut", transient=True)
        return answer

    for _ in range(2):
        assert store.retried("file", action) + store.retried("file", action) == "ok"
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["azure://box/a does not answer, trying again for 120 s: cut"] * 2


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=verysecret"),
        ("AZURE_STORAGE_CONNECTION_STRING", "verysecret"),
    ],
)
def test_a_connection_string_that_is_none_is_refused(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=f"{variable} is not a connection string") as refused:
        open_store("azure://box/a").read("file")
    assert "secret" not in str(refused.value) and refused.value.problems[0].remedy


def test_what_opens_a_place_and_the_place_itself_have_remedies_of_their_own(s3, monkeypatch):
    def remedy(uri: str) -> str:
        with pytest.raises(UserError) as refused:
            open_data_set(uri, patience=0)
        return refused.value.problems[0].remedy

    assert "prepare ... --upload URL" in remedy("s3://box/nothing")
    assert remedy("s3://nobox/data").startswith("make the bucket (aws s3 mb s3://nobox)")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "export AWS_ACCESS_KEY_ID=" in remedy("s3://box/nothing")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "me")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "cut")
    assert remedy("azure://box/data").startswith("that is not an account key: AZURE_STORAGE_KEY")


def test_azures_own_package_writes_down_no_requests(monkeypatch):
    sdk = logging.getLogger("azure")
    monkeypatch.setattr(sdk, "level", logging.NOTSET)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=me;AccountKey=a2V5")
    assert open_store("azure://box").client and sdk.level == logging.WARNING
    assert not logging.getLogger("azure.identity").isEnabledFor(logging.WARNING)


def test_who_waits_can_give_up(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "x")
    store = open_store("azure://box", patience=60)
    monkeypatch.setattr(store, "_size", lambda key: 10)
    monkeypatch.setattr(store, "_range", lambda *_: b"short")  # a truncated answer, each time
    calls: list[int] = []

    def give_up(count: int) -> None:
        calls.append(count)
        if len(calls) > 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        store.download("file", tmp_path / "to", give_up)
    assert calls == [0, 0, 0]  # no byte of it was taken for the file's


def test_what_a_server_or_a_package_says_shows_no_signature(monkeypatch):
    from azure.core.exceptions import ServiceRequestError

    store = open_store("https://me.blob.core.windows.net/box?sig=verysecret", patience=0)

    def fails() -> None:
        raise ServiceRequestError("no answer from /box/file?sv=1&sig=verysecret&se=2")

    with pytest.raises(StoreError, match="no answer") as error:
        store.retried("file", fails)
    assert "secret" not in str(error.value)
