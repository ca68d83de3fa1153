"""Uploads of prepared data sets: complete, resumed, never over anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError

from distdl.datasets.format import MANIFEST
from distdl.datasets.reading import open_data_set
from distdl.datasets.upload import check_target, upload
from distdl.stores import StoreError
from distdl.stores.files import FileStore
from tests.miniature import everything as contents
from tests.prepared import flip, prepare, refusal


@pytest.fixture
def out(tmp_path: Path) -> Path:
    prepare(tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def send(out: Path, to: Path) -> list[tuple[int, int]]:
    """Uploads, and returns the progress."""
    progress: list[tuple[int, int]] = []
    upload(out, str(to), lambda *now: progress.append(now))
    return progress


def refused(out: Path, to: Path) -> str:
    problem = refusal(send, out, to)
    assert problem.path == "--upload" and problem.remedy
    return problem.what


def test_everything_arrives_and_a_second_time_nothing_is_sent(out, there, monkeypatch):
    progress = send(out, there)
    assert contents(there) == contents(out)
    total = sum(len(data) for name, data in contents(out).items() if name != MANIFEST)
    assert progress[0] == (0, total) and progress[-1] == (total, total)
    assert progress == sorted(progress)
    monkeypatch.setattr(FileStore, "upload", None)
    send(out, there)
    check_target(str(there), out)
    assert "a prepared data set already" in refusal(check_target, str(there), None).what


def test_it_resumes_and_the_manifest_comes_last(out, there, monkeypatch):
    sent: list[str] = []
    real, limit = FileStore.upload, 4

    def limited(self, path, name, progress=None) -> None:
        if len(sent) == limit:
            raise StoreError(f"{name}: the server is gone", transient=True)
        real(self, path, name, progress)
        sent.append(name)

    monkeypatch.setattr(FileStore, "upload", limited)
    monkeypatch.setattr("distdl.datasets.upload.PARALLEL", 1)
    problem = refusal(send, out, there)
    assert "the server is gone" in problem.what and "the same command" in problem.remedy
    assert sent[:2] == ["train.index.npy", "val.index.npy"]
    assert contents(there).keys() == set(sent)
    limit = 99
    send(out, there)
    assert sent[-1] == MANIFEST and len(sent) == len(set(sent))
    assert contents(there) == contents(out)


def test_other_files_are_never_replaced_or_mixed_with(out, there, tmp_path):
    prepare(tmp_path / "other", train=30)
    send(tmp_path / "other", there)
    before = contents(there)
    assert "holds another prepared data set" in refused(out, there)
    (there / MANIFEST).unlink()  # as if that upload was interrupted
    assert "holds another train-00003.tar" in refused(out, there)
    assert contents(there) == {k: v for k, v in before.items() if k != MANIFEST}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    assert "holds something else: thesis.tex" in refused(out, tmp_path / "mine")
    assert [*contents(tmp_path / "mine")] == ["thesis.tex"]


def test_a_damaged_data_set_is_not_published(out, there, tmp_path):
    assert "is not a prepared data set" in refused(tmp_path / "none", there)
    flip(out / "train-00002.tar", 700)
    assert "train-00002.tar is damaged" in refused(out, there)
    (out / "train-00002.tar").unlink()
    assert "train-00002.tar is missing" in refused(out, there)
    assert not {"train-00002.tar", MANIFEST} & contents(there).keys()


def test_a_file_that_arrives_short_is_found(out, there, monkeypatch):
    real = FileStore.upload

    def cut(self, path, name, progress=None) -> None:
        real(self, path, name, progress)
        if name == "train-00001.tar":
            (self.folder / name).write_bytes(path.read_bytes()[:1000])

    monkeypatch.setattr(FileStore, "upload", cut)
    assert "train-00001.tar has 1000 bytes at" in refused(out, there)
    assert MANIFEST not in contents(there)


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (404, "ContainerNotFound", "az storage container create --name c"),
        (403, "AuthorizationPermissionMismatch", "Storage Blob Data Reader"),
        (403, "AuthenticationFailed", "docs/data/reading.md"),
        (400, "InvalidVersion", ""),  # nothing that a user could do
    ],
)
def test_refused_requests_come_with_a_remedy(status, code, remedy, out, monkeypatch):
    def fails(*_: Any, **options: Any) -> None:
        error = HttpResponseError("the server's words")
        error.status_code, error.error_code = status, code
        raise error

    for name in ("ContainerClient.list_blobs", "BlobClient.get_blob_properties"):
        monkeypatch.setattr(f"azure.storage.blob.{name}", fails)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "nobody")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "a2V5")

    for path, action, *target in (
        ("data.root", open_data_set),
        ("--upload", check_target, None),
        ("--upload", check_target, out),
    ):
        problem = refusal(action, "azure://c/p", *target)
        assert problem.path == path and "the server's words" in problem.what
        assert remedy in problem.remedy and bool(problem.remedy) == bool(remedy)
