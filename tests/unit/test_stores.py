"""Stores: addresses, a folder, S3 (moto's server); uploads of prepared data sets: complete,
resumed, never over anything else. Azure: tests/cluster/test_azurite.py."""

import logging
import os
import pickle

import pytest
from azure.core.exceptions import HttpResponseError

from distdl.datasets.format import MANIFEST
from distdl.datasets.reading import open_data_set
from distdl.stores import StoreError, is_remote, open_store
from distdl.stores import remote as remote_module
from distdl.stores.files import FileStore
from distdl.tools.prepare.upload import check_target, upload
from tests import aws
from tests.miniature import everything
from tests.prepared import Unreliable, flip, prepare, refusal

moto, s3 = aws.moto, aws.s3  # fixtures
STRING, ACCOUNT, KEY, SAS = (
    f"AZURE_STORAGE_{name}" for name in ("CONNECTION_STRING", "ACCOUNT", "KEY", "SAS_TOKEN")
)


@pytest.fixture(autouse=True)
def no_account(monkeypatch):
    for name in (STRING, ACCOUNT, KEY, SAS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.parametrize(
    ("uri", "server"),
    [
        ("/images", "/images"),
        ("file:///a%20b", "/a b"),
        ("~/x", os.path.expanduser("~/x")),
        ("az://box/a/b", "https://mine.blob.core.windows.net/box"),
        ("abfss://box@me.dfs.core.windows.net/a", "https://me.blob.core.windows.net/box"),
        ("https://me.blob.core.cloudapi.de/box/a", "https://me.blob.core.cloudapi.de/box"),
        ("http://127.0.0.1:10000/mine/box/a", "http://127.0.0.1:10000/mine/box"),
    ],
)
def test_addresses(uri, server, monkeypatch):
    monkeypatch.setenv(ACCOUNT, "mine")
    monkeypatch.setenv(KEY, "a2V5")
    assert is_remote(uri) == server.startswith("http")
    assert open_store(uri).address == (f"{server} {uri}" if is_remote(uri) else server)


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
    assert what in problem.what
    assert problem.path == uri.partition("?")[0]
    assert problem.remedy
    assert "secret" not in str(problem)


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path, own_name):
    if request.param == "folder":
        return open_store(str(tmp_path / "kept/images"))
    request.getfixturevalue("s3")
    return open_store(f"s3://box/{own_name}/images", patience=2)


def test_files_are_stored_once_and_read_back(store, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_module, "PART", 100_000)
    source = tmp_path / "source"
    back = tmp_path / "back"
    data = os.urandom(1_234_567)
    source.write_bytes(data)
    sent, received = [], []
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
    assert back.read_bytes() == data
    assert sum(sent) == sum(received) == len(data)
    assert store.size("a/b.tar") == len(data)
    assert store.size("a") is None
    assert list(store.names()) == ["a/b.tar", "nothing"]
    assert list(store.names("a/")) == ["a/b.tar"]
    with pytest.raises(StoreError, match="exists already"):
        store.upload(tmp_path / "empty", "a/b.tar")
    assert store.read("a/b.tar") == data
    assert store.read("nothing") == b""


def test_a_file_that_changes_is_replaced_and_removed(store, tmp_path):
    file = tmp_path / "status.json"
    for content in (b"one", b"two, longer", b""):
        file.write_bytes(content)
        store.replace(file, "run/status.json")
        assert store.read("run/status.json") == content
    assert [*store.names()] == ["run/status.json"]
    for _ in range(2):  # one that is gone is no error
        store.remove("run/status.json")
    assert [*store.names()] == []


@pytest.mark.parametrize("size", [1000, 9 << 20])  # as one object, and in parts
def test_an_upload_replaces_nothing_and_leaves_nothing_unfinished(store, tmp_path, size):
    for number in "12":
        (tmp_path / number).write_bytes(number.encode() * size)

    def interrupt(count):
        if count:
            raise KeyboardInterrupt

    if size > 1000:  # a small object is complete at once
        with pytest.raises(KeyboardInterrupt):
            store.upload(tmp_path / "1", "file", interrupt)
        assert list(store.names()) == []
        assert not any(tmp_path.glob("kept/images/*"))

    def overtaken(count):  # the other has looked, and found nothing of that name
        if store.size("file") is None:
            store.upload(tmp_path / "2", "file")

    with pytest.raises(StoreError, match=f"{store.uri}/file exists already"):
        store.upload(tmp_path / "1", "file", overtaken)
    assert store.read("file") == b"2" * size
    assert list(store.names()) == ["file"]


@pytest.mark.parametrize(
    ("size", "call"), [(1000, "put_object"), (9 << 20, "complete_multipart_upload")]
)
def test_a_response_that_is_lost_does_not_fail_an_upload(
    s3, tmp_path, own_name, size, call, monkeypatch
):
    from botocore.exceptions import ReadTimeoutError

    store = open_store(f"s3://box/{own_name}", patience=20)
    (tmp_path / "one").write_bytes(bytes(size))
    real = getattr(store.client, call)
    lost = []

    def losing(**options):
        response = real(**options)
        if not lost:
            lost.append(call)
            raise ReadTimeoutError(endpoint_url="x")
        return response

    monkeypatch.setattr(store.client, call, losing)
    store.upload(tmp_path / "one", "file")
    assert lost
    assert store.size("file") == size


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (404, "ContainerNotFound", "az storage container create --name box"),
        (403, "AuthorizationPermissionMismatch", "Storage Blob Data Reader"),
        (403, "AuthenticationFailed", "docs/data/reading.md"),
        (503, "ServerBusy", ""),
    ],
)
def test_what_azure_refuses_comes_with_a_remedy_and_no_signature(status, code, remedy):
    store = open_store("https://me.blob.core.windows.net/box?sig=verysecret", patience=0)

    def fails():
        error = HttpResponseError("the server's words: /box/file?sv=1&sig=verysecret&se=2")
        error.status_code = status
        error.error_code = code
        raise error

    with pytest.raises(StoreError, match="the server's words") as raised:
        store.retried("file", fails)
    error = raised.value
    assert remedy in error.remedy
    assert bool(error.remedy) == bool(remedy)
    assert error.transient == (status == 503)
    assert "secret" not in str(error) + store.uri + repr(store) + store.address


def test_a_kept_manifest_is_of_one_server(s3, tmp_path, monkeypatch):
    prepare(tmp_path / "far")
    uri = "s3://box/kept"
    cache = tmp_path / "cache"
    open_store(uri, patience=2).upload(tmp_path / "far" / MANIFEST, MANIFEST)
    open_data_set(uri, cache_root=cache).keep(cache)
    (kept,) = (cache / "manifests").iterdir()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # another, with the same bucket
    with pytest.raises(StoreError, match=f"{uri}/{MANIFEST}") as error:
        open_store(uri, patience=0.5).read(MANIFEST)
    assert error.value.transient
    assert refusal(open_data_set, uri, patience=0.1, cache_root=cache).path == "data.root"
    assert kept.read_bytes() == (tmp_path / "far" / MANIFEST).read_bytes()


def test_each_outage_is_logged_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(remote_module.time, "sleep", lambda seconds: None)
    (tmp_path / "file").write_text("content")
    answers = iter("--ok--ok")

    def answer():
        if next(answers) == "-":
            raise ConnectionError("reset")

    store = Unreliable(tmp_path, answer)
    for _ in range(4):
        assert store.read("file") == b"content"
    assert caplog.messages == ["box://data does not answer, trying again for 120 s: reset"] * 2
    parts = iter((b"cut", b"content"))
    monkeypatch.setattr(store, "_range", lambda *_: next(parts))
    monkeypatch.setattr(store, "answer", lambda: None)
    assert store.read("file") == b"content"


def test_credentials_are_checked_and_requests_not_logged(monkeypatch):
    for text in ("AccountKey=verysecret", "verysecret"):
        monkeypatch.setenv(STRING, text)
        problem = refusal(open_store("azure://box/a").read, "file")
        assert STRING in problem.what
        assert problem.remedy
        assert "secret" not in str(problem)
    monkeypatch.setenv(STRING, "AccountName=me;AccountKey=a2V5")
    assert open_store("azure://box").client
    monkeypatch.delenv(STRING)
    monkeypatch.setenv(ACCOUNT, "me")
    monkeypatch.setenv(SAS, "?sv=1&sig=secret")
    store = open_store("azure://box")
    assert store.client.url.endswith("/box?sv=1&sig=secret")
    assert "secret" not in store.address
    for name in ("azure", "azure.identity"):
        assert not logging.getLogger(name).isEnabledFor(logging.INFO)


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
    if "prepare" not in remedy:  # before hours of work
        problem = refusal(check_target, uri, None)
        assert problem.path == "--upload"
        assert remedy in problem.remedy


@pytest.fixture
def out(tmp_path):
    prepare(tmp_path / "out")
    return tmp_path / "out"


def send(out, to):
    upload(out, str(to), lambda done, total: None)


def refused(out, to):
    problem = refusal(send, out, to)
    assert problem.path == "--upload"
    assert problem.remedy
    return problem.what


def test_an_upload_resumes_and_the_manifest_comes_last(out, tmp_path, monkeypatch):
    there = tmp_path / "there"
    sent = []
    real = FileStore.upload
    limit = 4

    def limited(self, path, name, progress=None):
        if len(sent) == limit:
            raise StoreError(f"{name}: the server is gone", transient=True)
        real(self, path, name, progress)
        sent.append(name)

    monkeypatch.setattr(FileStore, "upload", limited)
    monkeypatch.setattr("distdl.tools.prepare.upload.PARALLEL", 1)
    problem = refusal(send, out, there)
    assert "the server is gone" in problem.what
    assert "the same command" in problem.remedy
    assert sent[:2] == ["train.index.npy", "val.index.npy"]
    assert everything(there).keys() == set(sent)
    limit = 99
    send(out, there)
    assert sent[-1] == MANIFEST
    assert len(sent) == len(set(sent))
    assert everything(there) == everything(out)
    monkeypatch.setattr(FileStore, "upload", None)  # a second time nothing is sent
    send(out, there)
    check_target(str(there), out)
    assert "a prepared data set already" in refusal(check_target, str(there), None).what


def test_other_files_are_never_replaced_or_mixed_with(out, tmp_path):
    there, other = tmp_path / "there", tmp_path / "other"
    prepare(other, train=30)
    send(other, there)
    before = everything(there)
    assert "holds another prepared data set" in refused(out, there)
    (there / MANIFEST).unlink()  # as if that upload was interrupted
    assert "holds another train-00003.tar" in refused(out, there)
    assert everything(there) == {k: v for k, v in before.items() if k != MANIFEST}
    (there / "thesis.tex").touch()
    assert "holds something else: thesis.tex" in refused(out, there)


def test_a_damaged_data_set_is_not_published(out, tmp_path, monkeypatch):
    there = tmp_path / "there"
    assert "is not a prepared data set" in refused(tmp_path / "none", there)
    intact = (out / "train-00002.tar").read_bytes()
    flip(out / "train-00002.tar", 700)
    assert "train-00002.tar is damaged" in refused(out, there)
    (out / "train-00002.tar").unlink()
    assert "train-00002.tar is missing" in refused(out, there)
    (out / "train-00002.tar").write_bytes(intact)
    real = FileStore.upload

    def cut(self, path, name, progress=None):
        real(self, path, name, progress)
        if name == "train-00002.tar":
            (self.folder / name).write_bytes(path.read_bytes()[:1000])

    monkeypatch.setattr(FileStore, "upload", cut)
    assert "train-00002.tar has 1000 bytes at" in refused(out, there)
    assert MANIFEST not in everything(there)
