"""A checkpoint exists when its manifest does, and is opened only if it is what was written."""

from __future__ import annotations

import json
import logging
import os
from fnmatch import fnmatch
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


def save(
    store: CheckpointStore, step: int, content: bytes = b"weights", folder: bool = False
) -> Path:
    temporary = store.temporary(f"step_{step}.ckpt")
    for part in ("0.distcp", "inner/1.distcp") if folder else ("",):
        (temporary / part).parent.mkdir(parents=True, exist_ok=True)
        (temporary / part).write_bytes(content + str(step).encode())
    return store.publish(f"step_{step}.ckpt", step=step, epoch=0, reason="step")


def names(store: CheckpointStore) -> list[str]:
    return [path.name for path in store.all()]


def refused(*_: Any, **__: Any) -> None:
    raise OSError("not supported")


def test_the_manifest_describes_the_file_and_the_newest_has_most_steps(store) -> None:
    assert store.newest() is None
    for step in (30, 4, 200):
        path = save(store, step)
    manifest = json.loads(manifest_of(path).read_text())
    assert manifest["files"][path.name]["size"] == path.stat().st_size
    assert (manifest["step"], manifest["reason"]) == (200, "step") and damage_of(path) is None
    assert names(store) == ["step_200.ckpt", "step_30.ckpt", "step_4.ckpt"]
    store.temporary("step_7.ckpt").write_bytes(b"half")  # what a kill left
    store.temporary("step_8.ckpt").mkdir()
    (store.folder / "step_9.ckpt.tmp").write_bytes(b"a user's")
    store.prune(1)
    kept = {path.name, manifest_of(path).name, "step_9.ckpt.tmp"}
    assert {p.name for p in store.folder.iterdir()} == kept


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


DAMAGE = [
    (cut, "bytes, and 8 were written"),
    (flip, "sha256 differs"),
    (Path.unlink, "is missing"),
    *(
        (lambda path, text=text: manifest_of(path).write_text(text), "no readable manifest")
        for text in ("{", "[1]", '{"files": {}}', '{"files": {"a": 1}}')
    ),
    (lambda path: manifest_of(path).unlink(), "it has no manifest"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_one_is_skipped_and_if_all_are_the_run_does_not_start_again(
    store, caplog, damage, message
) -> None:
    old, new = save(store, 1), save(store, 2)
    damage(new)
    assert message in damage_of(new)
    with caplog.at_level(logging.WARNING):
        assert store.newest() == old
    assert f"skipped a damaged checkpoint: {new}: " in caplog.text
    store.alias("best.ckpt", old)
    old.unlink()
    assert store.newest() == store.folder / "best.ckpt", "what is left of it"
    flip(store.folder / "best.ckpt")
    with pytest.raises(UserError) as error:
        store.newest()
    (problem,) = error.value.problems
    assert error.value.exit_code == 2 and problem.path == str(store.folder)
    assert f"mv {store.folder} {store.folder}.damaged" in problem.remedy
    lines = {"step_2.ckpt": message, "step_1.ckpt": "is missing", "best.ckpt": "sha256 differs"}
    for line, (name, what) in zip(
        sorted(problem.what.split("\n")[1:]), sorted(lines.items()), strict=True
    ):
        assert line.strip().startswith(name) and what in line


def no_manifest(source: Path, target: Path, rename: Any = os.rename) -> None:
    if fnmatch(Path(target).name, "step_*.manifest.json"):
        refused()
    rename(source, target)


@pytest.mark.parametrize(
    ("at", "crashes"),
    [
        *((at, refused) for at in ("distdl.runs.checkpoints.write_json", "os.fsync", "os.replace")),
        ("os.replace", no_manifest),
    ],
)
def test_a_crash_while_publishing_leaves_the_one_before(store, monkeypatch, at, crashes) -> None:
    old = save(store, 1)
    for step in (2, 1):  # also where the same step is reached again
        with monkeypatch.context() as crash:
            crash.setattr(at, crashes)
            with pytest.raises(OSError, match="not supported"):
                save(store, step, b"others")
        if step == 2:
            assert store.newest() == old and save(store, 2) == store.newest()
    # New bytes are never paired with the old manifest.
    assert not manifest_of(old).exists() or damage_of(old) is None


@pytest.mark.parametrize("links", [True, False])
def test_aliases(store, monkeypatch, links) -> None:
    if not links:  # as on blobfuse
        monkeypatch.setattr(os, "link", refused)
    first, second = save(store, 1), save(store, 2)
    store.alias("last.ckpt", first)
    store.alias("last.ckpt", second)
    store.alias("best.ckpt", first)
    last, best = store.folder / "last.ckpt", store.folder / "best.ckpt"
    assert last.read_bytes() == second.read_bytes() and damage_of(last) is None
    assert json.loads(manifest_of(last).read_text())["alias_of"] == second.name
    assert (last.stat().st_ino == second.stat().st_ino) is links
    # An alias is not a checkpoint of its own, and what it refers to outlives the pruning.
    store.prune(1)
    assert names(store) == [second.name] and not first.exists()
    assert damage_of(best) is None and find(best) == best


def test_a_folder_of_slices(store) -> None:
    for step in (1, 2):
        path = save(store, step, folder=True)
        store.alias("last.ckpt", path)
    last = store.folder / "last.ckpt"
    assert store.newest() == path and find(last).is_dir()
    store.prune(keep=1)
    assert store.all() == [path] and not (store.folder / "step_1.ckpt").exists()
    (path / "inner/1.distcp").unlink()  # a hard link: last.ckpt keeps its own
    assert damage_of(path) == "step_2.ckpt/inner/1.distcp is missing" and damage_of(last) is None


def test_a_checkpoint_as_a_user_names_it(store, tmp_path) -> None:
    path = save(store, 1)
    assert find(tmp_path / "run") == path and find(str(path)) == path
    foreign = tmp_path / "foreign.ckpt"
    for zipped in (True, False):
        torch.save({}, foreign, _use_new_zipfile_serialization=zipped)
        assert find(foreign) == foreign  # it has no manifest, and that is not damage
    cases = [(tmp_path / "nowhere.ckpt", "no such checkpoint")]
    for number, content in enumerate((b"", b"from elsewhere", b"PK\3\4 and cut off")):
        (tmp_path / f"{number}.ckpt").write_bytes(content)
        cases.append((tmp_path / f"{number}.ckpt", "is not a checkpoint, or an incomplete one"))
    cut(path)
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    cases += [(path, "is damaged"), (tmp_path / "empty", "this run has no checkpoint")]
    for named, message in cases:
        with pytest.raises(UserError, match=message) as error:
            find(named, "checkpoint.resume_from")
        assert error.value.problems[0].path == f"checkpoint.resume_from={named}"


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("folder", [True, False])
def test_nothing_is_deleted_before_what_replaces_it_is_on_the_disk(
    store, monkeypatch, folder: bool, links: bool
) -> None:
    """At each removal of a name, all that the newest checkpoint needs has been synced."""
    synced: set[Path] = set()
    named: dict[Path, bool] = {}  # what was renamed -> whether its folder was synced since
    events: list[str] = []
    fsync, replace, remove = os.fsync, os.replace, checkpoints.remove

    def on_fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.add(path)
        named.update({p: True for p in named if p.parent == path})
        fsync(handle)

    def on_replace(source: Path, target: Path) -> None:
        unsynced = {source, *source.rglob("*")} - synced
        assert not unsynced, f"{unsynced} have their name before their bytes are on the disk"
        named[target] = False
        synced.add(target)
        events.append(target.name)
        replace(source, target)

    def on_remove(path: Path) -> None:
        if path.name == "step_1.ckpt":
            assert all(named.values()), [p.name for p, done in named.items() if not done]
            events.append("removed")
        remove(path)

    def write(step: int) -> None:
        store.alias("last.ckpt", save(store, step, folder=folder))
        store.prune(1)

    write(1)
    monkeypatch.setattr(os, "fsync", on_fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: on_replace(Path(a), Path(b)))
    monkeypatch.setattr(checkpoints, "remove", on_remove)
    if not links:
        monkeypatch.setattr(os, "link", refused)
    write(2)
    pairs = [(name, f"{name}.manifest.json") for name in ("step_2.ckpt", "last.ckpt")]
    kept = [name for name in events if not name.startswith(".")]
    assert kept == [*pairs[0], *pairs[1], "removed"]
    assert not manifest_of(store.folder / "step_1.ckpt").exists()
