"""A checkpoint exists when its manifest does, and is opened only if it is what was written."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from distdl.runs import checkpoints
from distdl.runs.checkpoints import CheckpointStore, damage_of, find, manifest_of
from distdl.util.errors import UserError


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run/checkpoints")


def save(store: CheckpointStore, step: int, content: bytes = b"weights") -> Path:
    name = f"step_{step}.ckpt"
    store.temporary(name).write_bytes(content + str(step).encode())
    return store.publish(name, step=step, epoch=0, reason="step")


def names(store: CheckpointStore) -> list[str]:
    return [path.name for path in store.all()]


def test_the_manifest_says_what_was_written(store) -> None:
    path = save(store, 3)
    manifest = json.loads(manifest_of(path).read_text())
    assert manifest["files"][path.name]["size"] == path.stat().st_size
    assert (manifest["step"], manifest["reason"]) == (3, "step")
    assert damage_of(path) is None
    assert {p.name for p in store.folder.iterdir()} == {path.name, manifest_of(path).name}


def test_without_its_manifest_it_does_not_exist(store) -> None:
    old, new = save(store, 1), save(store, 2)
    manifest_of(new).unlink()
    assert names(store) == [old.name] and store.newest() == old
    manifest_of(old).unlink()
    with pytest.raises(UserError, match=r"step_1\.ckpt: it has no manifest: its writing was cut"):
        store.newest()


def test_the_newest_is_the_one_with_most_steps(store) -> None:
    for step in (30, 4, 200):
        save(store, step)
    assert names(store) == ["step_200.ckpt", "step_30.ckpt", "step_4.ckpt"]
    assert CheckpointStore(store.folder / "none").newest() is None


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "bytes, and 8 were written"),
        (flip, "sha256 differs"),
        (Path.unlink, "is missing"),
        (lambda path: manifest_of(path).write_text("{"), "no readable manifest"),
        (lambda path: manifest_of(path).write_text("[1]"), "no readable manifest"),
        (lambda path: manifest_of(path).write_text('{"files": {}}'), "no readable manifest"),
        (lambda path: manifest_of(path).write_text('{"files": {"a": 1}}'), "no readable manifest"),
        (lambda path: manifest_of(path).unlink(), "it has no manifest"),
    ],
)
def test_a_damaged_one_is_skipped_with_a_warning(store, caplog, damage, words) -> None:
    old, new = save(store, 1), save(store, 2)
    damage(new)
    assert words in damage_of(new)
    with caplog.at_level(logging.WARNING):
        assert store.newest() == old
    assert "damaged checkpoint" in caplog.text and new.name in caplog.text


def power_cut(*_: Any, **__: Any) -> None:
    raise OSError("power cut")


@pytest.mark.parametrize(
    "at", ["distdl.runs.checkpoints.write_json", "os.fsync", "os.replace"], ids=lambda at: at[-7:]
)
def test_a_crash_while_publishing_leaves_the_one_before(store, monkeypatch, at) -> None:
    old = save(store, 1)
    with monkeypatch.context() as crash:
        crash.setattr(at, power_cut)
        with pytest.raises(OSError, match="power cut"):
            save(store, 2)
    assert store.newest() == old and save(store, 2) == store.newest()


def test_a_replay_of_the_same_step_never_pairs_new_bytes_with_the_old_manifest(
    store, monkeypatch
) -> None:
    path = save(store, 1)
    with monkeypatch.context() as crash:
        crash.setattr(os, "replace", power_cut)
        with pytest.raises(OSError, match="power cut"):
            save(store, 1, b"others")
    assert not manifest_of(path).exists() or damage_of(path) is None
    path.unlink()
    manifest_of(path).unlink(missing_ok=True)
    assert store.newest() is None, "what has no name yet is not a checkpoint"


@pytest.mark.parametrize("links", [True, False])
def test_aliases(store, monkeypatch, links) -> None:
    if not links:  # as on blobfuse

        def refuse(*_):
            raise OSError("operation not supported")

        monkeypatch.setattr(checkpoints.os, "link", refuse)
    first, second = save(store, 1), save(store, 2)
    store.alias("last.ckpt", first)
    store.alias("last.ckpt", second)
    store.alias("best.ckpt", first)
    last, best = store.folder / "last.ckpt", store.folder / "best.ckpt"
    assert last.read_bytes() == second.read_bytes() and damage_of(last) is None
    assert json.loads(manifest_of(last).read_text())["alias_of"] == second.name
    assert (last.stat().st_ino == second.stat().st_ino) is links
    # An alias is not a checkpoint of its own, and what it means outlives the pruning.
    assert names(store) == [second.name, first.name]
    store.prune(1)
    assert names(store) == [second.name] and not first.exists()
    assert damage_of(best) is None and find(best) == best


def test_only_the_newest_are_kept(store) -> None:
    for step in range(1, 6):
        save(store, step)
    store.prune(2)
    assert names(store) == ["step_5.ckpt", "step_4.ckpt"]
    assert len(list(store.folder.iterdir())) == 4


def test_what_a_kill_left_half_written_goes_with_the_old(store) -> None:
    store.temporary("step_7.ckpt").write_bytes(b"half")
    (store.temporary("step_8.ckpt")).mkdir()
    (store.folder / "step_9.ckpt.tmp").write_bytes(b"a user's")
    path = save(store, 10)
    store.prune(1)
    assert {p.name for p in store.folder.iterdir()} == {
        *("step_9.ckpt.tmp", path.name, manifest_of(path).name),
    }


def test_a_checkpoint_as_a_user_names_it(store, tmp_path) -> None:
    with pytest.raises(UserError, match="no such checkpoint"):
        find(tmp_path / "nowhere.ckpt")
    path = save(store, 1)
    assert find(tmp_path / "run") == path and find(str(path)) == path
    foreign = tmp_path / "foreign.ckpt"
    torch.save({}, foreign)
    assert find(foreign) == foreign  # it has no manifest, and that is not damage
    torch.save({}, foreign, _use_new_zipfile_serialization=False)
    assert find(foreign) == foreign
    for content in (b"", b"from elsewhere", b"PK\3\4 and cut off"):
        foreign.write_bytes(content)
        with pytest.raises(UserError, match="is not a checkpoint, or not all of one"):
            find(foreign, "checkpoint.resume_from")
    cut(path)
    with pytest.raises(UserError, match=r"is damaged: step_1\.ckpt has 7 bytes"):
        find(path)
    with pytest.raises(UserError, match="all checkpoints of this run are damaged"):
        find(tmp_path / "run")
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="this run has no checkpoint"):
        find(tmp_path / "empty")


def test_if_all_are_damaged_the_run_does_not_begin_anew(store) -> None:
    paths = [save(store, step) for step in (1, 2)]
    store.alias("last.ckpt", paths[1])
    store.alias("best.ckpt", paths[0])
    cut(paths[1])  # and last.ckpt, which is the same file
    paths[0].unlink()
    assert store.newest() == store.folder / "best.ckpt", "what is left of it"
    flip(store.folder / "best.ckpt")
    with pytest.raises(UserError) as told:
        store.newest()
    said = str(told.value)
    assert told.value.exit_code == 2 and f"mv {store.folder} {store.folder}.damaged" in said
    assert "step_2.ckpt: step_2.ckpt has 7 bytes, and 8 were written" in said
    assert "step_1.ckpt: step_1.ckpt is missing" in said
    assert "best.ckpt: best.ckpt is not what was written (sha256 differs)" in said


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_nothing_is_deleted_before_what_replaces_it_is_on_the_disk(
    store, monkeypatch, sharded: bool, links: bool
) -> None:
    """At each removal of a name, all that the newest checkpoint needs has been synced."""
    synced: set[Path] = set()
    named: dict[Path, bool] = {}  # what was renamed -> whether its folder was synced since
    happened: list[str] = []
    fsync, replace, remove = os.fsync, os.replace, checkpoints.remove

    def on_fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.add(path)
        named.update({p: True for p in named if p.parent == path})
        fsync(handle)

    def on_replace(source: Any, target: Any) -> None:
        source, target = Path(source), Path(target)
        if source.is_dir():
            parts = {source, *source.rglob("*")}
            assert parts <= synced, parts - synced
        assert source in synced, f"{source} has its name before its bytes are on the disk"
        named[target] = False
        synced.add(target)
        happened.append(target.name)
        replace(source, target)

    def on_remove(path: Path) -> None:
        if path.name == "step_1.ckpt":
            assert all(named.values()), [p.name for p, done in named.items() if not done]
            happened.append("removed")
        remove(path)

    def write(step: int) -> None:
        temporary = store.temporary(f"step_{step}.ckpt")
        if sharded:
            (temporary / "inner").mkdir(parents=True)
        (temporary / "inner/0.distcp" if sharded else temporary).write_bytes(b"weights")
        path = store.publish(f"step_{step}.ckpt", step=step)
        store.alias("last.ckpt", path)
        store.prune(1)

    write(1)
    monkeypatch.setattr(os, "fsync", on_fsync)
    monkeypatch.setattr(os, "replace", on_replace)
    monkeypatch.setattr(checkpoints, "remove", on_remove)
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("not supported")))
    write(2)
    kept = [name for name in happened if not name.startswith(".")]
    ends = ("", ".manifest.json")
    expected = [name + end for name in ("step_2.ckpt", "last.ckpt") for end in ends]
    assert kept == [*expected, "removed"] and not manifest_of(store.folder / "step_1.ckpt").exists()


def test_a_folder_of_slices(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        folder = store.temporary(f"epoch_{step}.ckpt")
        (folder / "inner").mkdir(parents=True)
        (folder / "0.distcp").write_bytes(b"zero" * step)
        (folder / "inner/1.distcp").write_bytes(b"one")
        path = store.publish(folder.name.removeprefix(".").removesuffix(".tmp"), step=step)
        store.alias("last.ckpt", path)
    assert store.newest() == path and find(tmp_path / "last.ckpt").is_dir()
    store.prune(keep=1)
    assert store.all() == [path] and not (tmp_path / "epoch_1.ckpt").exists()
    (path / "inner/1.distcp").unlink()  # a hard link: last.ckpt keeps its own
    assert damage_of(path) == "epoch_2.ckpt/inner/1.distcp is missing"
    assert damage_of(tmp_path / "last.ckpt") is None
