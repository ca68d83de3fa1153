"""The copy of a program's checkpoints in a store: whole, or as it was."""

from __future__ import annotations

import threading

import pytest

from distdl.job import JobState
from distdl.program import folder as folders
from distdl.program.folder import NotKept, SyncedFolder
from distdl.ranks.stopping import StopRequest
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
    one.finish(StopRequest(), 0.0, wait=False)
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
        one.finish(StopRequest(), 0.0, wait=False)
    two = synced(tmp_path, "two")
    two.restore()
    assert contents(two.path) == {"a": "old"}


class Working(threading.Event):
    """Does what the program does while the copy waits."""

    def __init__(self, work):
        super().__init__()
        self.work = work

    def wait(self, timeout=None):
        self.work()
        return False


def test_files_that_are_being_written_wait(tmp_path, monkeypatch):
    """The copy has the version before; a file that is replaced was finished, however often."""
    monkeypatch.setattr(folders, "QUIET_S", 60.0)
    one = synced(tmp_path, "one")
    grows, state = one.path / "log", one.path / "state"

    def append(text):
        with grows.open("a") as file:
            file.write(text)

    def save(text):
        (one.path / "state.new").write_text(text)
        (one.path / "state.new").replace(state)

    append("1")
    save("1")
    one._stop = Working(lambda: None)
    assert one.copy()
    append("2")
    save("2")
    one._stop = Working(lambda: (append("3"), save("3"), (one.path / "late").write_text("x")))
    assert one.copy()
    assert restored(tmp_path) == {"log": "1", "state": "2"}
    one.copy(finished=True)
    assert restored(tmp_path) == {"log": "123", "state": "3", "late": "x"}


def restored(tmp_path):
    other = synced(tmp_path, "other")
    other.restore()
    return contents(other.path)


def test_what_a_start_that_was_cut_off_left_is_removed(tmp_path):
    one = synced(tmp_path, "one")
    (one.path / "a").write_text("1")
    one.copy()
    (one.path / "checkpoint-50").mkdir()
    (one.path / "checkpoint-50/half").write_text("2")
    synced(tmp_path, "one").restore()
    assert contents(one.path) == {"a": "1"}


def test_the_last_copy_has_what_other_ranks_write(tmp_path):
    """The first rank of a node copies; another one's program ends later."""
    one = synced(tmp_path, "one")
    one.start()
    with folders.written_to(one.path):
        (one.path / "0").write_text("x")
    began, done = threading.Event(), threading.Event()

    def other():
        with folders.written_to(one.path):
            began.set()
            done.wait(20)
            (one.path / "1").write_text("y")

    threading.Thread(target=other).start()
    began.wait(20)
    threading.Timer(0.5, done.set).start()
    one.finish(StopRequest(), 0.0, wait=True)
    assert restored(tmp_path) == {"0": "x", "1": "y"}
    assert not one.path.exists()  # it is in the store


def test_who_is_asked_to_end_awaits_others_for_a_while(tmp_path):
    one = synced(tmp_path, "one")
    one.start()
    (one.path / "0").write_text("x")
    stop = StopRequest()
    stop.state, stop.signal = JobState.PREEMPTED, "SIGTERM"
    with folders.written_to(one.path):
        one.finish(stop, 0.3, wait=True)
    assert restored(tmp_path) == {"0": "x"}
    assert one.path.exists()


def test_a_list_leads_nowhere_else(tmp_path):
    one = synced(tmp_path, "one")
    (one.path / "a").write_text("x")
    one.copy()
    listed = next((tmp_path / "store").rglob("list-*"))
    listed.write_text(listed.read_text().replace('"a"', '"../../b"'))
    with pytest.raises(NotKept, match="leads out"):
        synced(tmp_path, "two").restore()
