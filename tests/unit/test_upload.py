"""Uploads of prepared data sets: whole, gone on with, never over anything else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from azure.core.exceptions import HttpResponseError

from distdl.datasets.format import MANIFEST
from distdl.datasets.reading import open_data_set
from distdl.datasets.upload import check_target, upload
from distdl.stores import StoreError
from distdl.stores.azure import BlobStore
from distdl.stores.files import FileStore
from distdl.util.errors import UserError
from tests.prepared import flip, prepare


@pytest.fixture
def out(tmp_path: Path) -> Path:
    prepare(tmp_path / "out")
    return tmp_path / "out"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(out: Path, to: Path) -> str:
    with pytest.raises(UserError) as error:
        upload(out, str(to), lambda done, total: None)
    return str(error.value)


def test_everything_arrives_and_a_second_time_nothing_is_sent(out, tmp_path, monkeypatch):
    told: list[tuple[int, int]] = []
    upload(out, str(tmp_path / "there"), lambda *now: told.append(now))
    assert contents(tmp_path / "there") == contents(out)
    total = sum(len(data) for name, data in contents(out).items() if name != MANIFEST)
    assert told[0] == (0, total) and told[-1] == (total, total) and told == sorted(told)
    monkeypatch.setattr(FileStore, "upload", None)
    upload(out, str(tmp_path / "there"), lambda *now: None)


def test_it_goes_on_where_it_was_and_the_manifest_comes_last(out, tmp_path, monkeypatch):
    sent: list[str] = []
    real = FileStore.upload

    def until_the_fourth(self, path, name, progress=None) -> None:
        if len(sent) == 4:
            raise StoreError(f"{name}: the server went away", transient=True)
        real(self, path, name, progress)
        sent.append(name)

    monkeypatch.setattr(FileStore, "upload", until_the_fourth)
    monkeypatch.setattr("distdl.datasets.upload.PARALLEL", 1)
    told = refused(out, tmp_path / "there")
    assert "the server went away" in told and "goes on where it was" in told
    assert sent[:2] == ["train.index.npy", "val.index.npy"]
    assert not (tmp_path / "there" / MANIFEST).exists()
    # Longer ago than a clock tells: what was there is left alone.
    times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "there").iterdir()}
    time.sleep(0.01)
    first, sent = sent, []
    monkeypatch.setattr(FileStore, "upload", lambda *a: (sent.append(a[2]), real(*a))[1])
    upload(out, str(tmp_path / "there"), lambda *now: None)
    assert sent[-1] == MANIFEST and set(sent) == contents(out).keys() - set(first)
    assert all((tmp_path / "there" / n).stat().st_mtime_ns == t for n, t in times.items())
    assert contents(tmp_path / "there") == contents(out)


def test_nothing_else_is_ever_replaced_or_mixed_with(out, tmp_path):
    other = tmp_path / "other"
    prepare(other, train=30)
    upload(other, str(tmp_path / "there"), lambda *now: None)
    before = contents(tmp_path / "there")
    assert "holds another prepared data set" in refused(out, tmp_path / "there")
    # An upload of it that was not finished has no manifest yet.
    (tmp_path / "there" / MANIFEST).unlink()
    assert "holds another train-00003.tar" in refused(out, tmp_path / "there")
    assert contents(tmp_path / "there") == {k: v for k, v in before.items() if k != MANIFEST}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    assert "holds something else: thesis.tex" in refused(out, tmp_path / "mine")
    assert [*contents(tmp_path / "mine")] == ["thesis.tex"]


def test_what_is_damaged_here_is_not_published(out, tmp_path):
    assert "is not a prepared data set" in refused(tmp_path / "none", tmp_path / "there")
    flip(out / "train-00002.tar", 700)
    assert "train-00002.tar is damaged" in refused(out, tmp_path / "there")
    (out / "train-00002.tar").unlink()
    assert "train-00002.tar is missing" in refused(out, tmp_path / "there")
    assert not {"train-00002.tar", MANIFEST} & contents(tmp_path / "there").keys()


def test_what_arrives_short_is_found(out, tmp_path, monkeypatch):
    real = FileStore.upload

    def cut(self, path, name, progress=None) -> None:
        real(self, path, name, progress)
        if name == "train-00001.tar":
            with (self.folder / name).open("r+b") as file:
                file.truncate(1000)

    monkeypatch.setattr(FileStore, "upload", cut)
    assert "train-00001.tar has 1000 bytes at" in refused(out, tmp_path / "there")
    assert not (tmp_path / "there" / MANIFEST).exists()


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (404, "ContainerNotFound", "az storage container create --name c"),
        (403, "AuthorizationPermissionMismatch", "Storage Blob Data Reader"),
        (403, "AuthenticationFailed", "what opens it: docs/data/reading.md"),
    ],
)
def test_what_a_store_refuses_comes_with_a_remedy(status, code, remedy, out, monkeypatch):
    said = "what the server says"

    def list_(self, start: str) -> None:
        error = HttpResponseError(said)
        error.status_code, error.error_code = status, code
        raise error

    monkeypatch.setattr(BlobStore, "_list", list_)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "nobody")
    for action in (
        lambda: check_target("azure://c/p", None),
        lambda: check_target("azure://c/p", out),
    ):
        with pytest.raises(UserError) as error:
            action()
        assert said in str(error.value) and remedy in str(error.value)


def test_what_a_server_cannot_do_has_no_remedy_of_ours(monkeypatch):
    def size(self, key: str) -> None:
        error = HttpResponseError("no such version")
        error.status_code = 400
        raise error

    monkeypatch.setattr(BlobStore, "_size", size)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "nobody")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "a2V5")
    with pytest.raises(UserError) as error:
        open_data_set("azure://c/p")
    assert not error.value.problems[0].remedy


def test_an_upload_may_be_gone_on_with_but_not_prepared_over(out, tmp_path):
    upload(out, str(tmp_path / "there"), lambda *now: None)
    check_target(str(tmp_path / "there"), out)
    with pytest.raises(UserError, match="holds a prepared data set already"):
        check_target(str(tmp_path / "there"), None)
