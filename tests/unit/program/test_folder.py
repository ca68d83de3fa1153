"""The copy of a program's checkpoints in a store: whole, or as it was."""

from __future__ import annotations

import os
import time

import pytest

from distdl.program import folder as folders
from distdl.program.folder import NotKept, SyncedFolder
from distdl.stores import StoreError


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(folders, "QUIET_S", 0.0)


def synced(tmp_path, name, node=0):
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    return SyncedFolder(path, f"file://{tmp_path}/store", node, 60)


def contents(path):
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_text() for file in files}


def test_restored_as_it_was(tmp_path):
    one = synced(tmp_path, "one")
    (one.path / "deep").mkdir()
    (one.path / "deep/a").write_text("1")
    (one.path / "b").write_text("2")
    assert one.copy()
    assert not one.copy()  # nothing has changed
    (one.path / "b").write_text("3!")
    one.finish()
    two = synced(tmp_path, "two")
    assert two.restore() == 2
    assert contents(two.path) == {"deep/a": "1", "b": "3!"}
    assert synced(tmp_path, "three", node=1).restore() == 0  # each node has its own


def test_an_upload_that_is_cut_off_changes_nothing(tmp_path, monkeypatch):
    one = synced(tmp_path, "one")
    (one.path / "a").write_text("old")
    one.copy()
    for name in ("a", "b"):
        (one.path / name).write_text("newer")
    upload = one._store.upload

    def cut(path, name, *more):
        if "list-" in name:
            raise StoreError("gone")
        upload(path, name, *more)

    monkeypatch.setattr(type(one._store), "upload", lambda store, *args: cut(*args))
    with pytest.raises(NotKept, match="gone"):
        one.finish()
    two = synced(tmp_path, "two")
    two.restore()
    assert contents(two.path) == {"a": "old"}


def test_files_that_are_being_written_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "QUIET_S", 60.0)
    one = synced(tmp_path, "one")
    (one.path / "a").write_text("half")
    assert not one.copy()
    before = time.time() - 120
    os.utime(one.path / "a", (before, before))
    assert one.copy()


def test_a_list_leads_nowhere_else(tmp_path):
    one = synced(tmp_path, "one")
    (one.path / "a").write_text("x")
    one.copy()
    listed = next((tmp_path / "store").rglob("list-*"))
    listed.write_text(listed.read_text().replace('"a"', '"../../b"'))
    with pytest.raises(NotKept, match="leads out"):
        synced(tmp_path, "two").restore()
