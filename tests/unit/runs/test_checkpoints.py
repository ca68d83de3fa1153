"""A checkpoint exists when its manifest does, and is opened only if it is what was written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from distdl.runs import checkpoints
from distdl.runs.checkpoints import CheckpointStore, damage_of, find, manifest_at, manifest_of
from distdl.util.atomic_files import ENDING
from tests.prepared import flip, refusal


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run/checkpoints")


def save(store, step: int, content: bytes = b"weights", folder: bool = False) -> Path:
    temporary = store.temporary(f"step_{step}.ckpt")
    for part in ("0.distcp", "inner/1.distcp") if folder else ("",):
        (temporary / part).parent.mkdir(parents=True, exist_ok=True)
        (temporary / part).write_bytes(content + str(step).encode())
    return store.publish(f"step_{step}.ckpt", step=step, epoch=0, reason="step")


def refused(*_: Any, **__: Any) -> None:
    raise OSError("not supported")


def test_the_manifest_describes_the_file_and_the_newest_has_most_steps(store):
    assert store.newest() is None
    for step in (30, 4, 200):
        path = save(store, step)
    manifest = manifest_at(path)
    assert manifest["files"][path.name]["size"] == path.stat().st_size
    assert (manifest["step"], manifest["reason"]) == (200, "step")
    assert damage_of(path) is None
    assert [p.name for p in store.all()] == ["step_200.ckpt", "step_30.ckpt", "step_4.ckpt"]
    store.temporary("step_7.ckpt").write_bytes(b"half")  # what a kill left
    store.temporary("step_8.ckpt").mkdir()
    manifest = store.temporary("step_8.ckpt.manifest.json")
    manifest.write_bytes(b"{")
    manifest.with_name(f".{manifest.name}.0123456789ab{ENDING}").write_bytes(b"{")
    (store.folder / "step_9.ckpt.tmp").write_bytes(b"a user's")
    store.prune(1)
    kept = {path.name, manifest_of(path).name, "step_9.ckpt.tmp"}
    assert {p.name for p in store.folder.iterdir()} == kept


def test_clearing_frees_what_has_no_name_elsewhere(store, tmp_path):
    paths = [save(store, step, b"x" * 1000, folder=step == 2) for step in (1, 2, 3)]
    store.alias("best.ckpt", paths[2])  # a name more, and no byte
    os.link(paths[0], tmp_path / "exported.ckpt")
    (store.folder / "mine.ckpt").write_bytes(b"without a manifest: somebody else's")
    store.temporary("step_7.ckpt").write_bytes(b"half")
    manifests = sum(p.stat().st_size for p in store.folder.glob("*.manifest.json"))
    assert store.clear() == manifests + 3 * 1001 + len(b"half")
    assert {p.name for p in store.folder.iterdir()} == {"mine.ckpt"}
    assert (tmp_path / "exported.ckpt").exists()
    assert store.clear() == 0


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


UNREADABLE = ("{", "[1]", '{"files": {}}', '{"files": {"a": 1}}')
DAMAGE = [
    (cut, "bytes, and 8 were written"),
    (lambda path: flip(path, 0), "sha256 differs"),
    (Path.unlink, "is missing"),
    (lambda path: manifest_of(path).unlink(), "it has no manifest"),
    *((lambda p, t=t: manifest_of(p).write_text(t), "no readable manifest") for t in UNREADABLE),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_one_is_skipped_and_if_all_are_the_run_does_not_start_again(
    store, caplog, damage, message
):
    old, new = save(store, 1), save(store, 2)
    damage(new)
    assert store.newest() == old
    assert f"skipped a damaged checkpoint: {new}: " in caplog.text
    assert message in caplog.text
    store.alias("best.ckpt", old)
    old.unlink()
    assert store.newest() == store.folder / "best.ckpt", "what is left of it"
    flip(store.folder / "best.ckpt", 0)
    problem = refusal(store.newest)
    assert problem.path == str(store.folder)
    assert f"mv {store.folder} {store.folder}.damaged" in problem.remedy
    lines = {"best.ckpt": "sha256 differs", "step_1.ckpt": "is missing", "step_2.ckpt": message}
    shown = sorted(problem.what.split("\n")[1:])
    for line, (name, what) in zip(shown, lines.items(), strict=True):
        assert line.strip().startswith(name)
        assert what in line


def no_manifest(source: Path, target: Path, rename: Any = os.rename) -> None:
    if Path(target).match("step_*.manifest.json"):
        refused()
    rename(source, target)


WRITES = ("distdl.runs.checkpoints.write_json", "os.fsync", "os.replace")


@pytest.mark.parametrize(
    ("at", "crashes"), [*((at, refused) for at in WRITES), ("os.replace", no_manifest)]
)
def test_a_crash_while_publishing_leaves_the_one_before(store, monkeypatch, at, crashes):
    old = save(store, 1)
    for step in (2, 1):  # also where the same step is reached again
        with monkeypatch.context() as crash:
            crash.setattr(at, crashes)
            with pytest.raises(OSError, match="not supported"):
                save(store, step, b"others")
        if step == 2:
            assert store.newest() == old
            assert save(store, 2) == store.newest()
    # New bytes are never paired with the old manifest.
    assert not manifest_of(old).exists() or damage_of(old) is None


@pytest.fixture
def order(monkeypatch) -> list[str]:
    """The names in the order in which files get them, and "removed" for the first checkpoint; what
    gets a name is on the disk by then, and before the removal so are the names."""
    synced: set[Path] = set()
    events: list[str] = []
    fsync = os.fsync
    replace = os.replace
    remove = checkpoints.remove

    def on_fsync(handle: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def on_replace(source: Path, target: Path) -> None:
        assert {source, *source.rglob("*")} <= synced
        synced.add(target)
        synced.discard(target.parent)
        events.append(target.name)
        replace(source, target)

    def on_remove(path: Path) -> None:
        if path.name == "step_1.ckpt":
            assert path.parent in synced
            events.append("removed")
        remove(path)

    monkeypatch.setattr(os, "fsync", on_fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: on_replace(Path(a), Path(b)))
    monkeypatch.setattr(checkpoints, "remove", on_remove)
    return events


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("folder", [True, False])
def test_aliases_of_files_and_of_folders(store, order, monkeypatch, folder, links):
    """And nothing is deleted before what replaces it is on the disk."""
    if not links:  # as on blobfuse
        monkeypatch.setattr(os, "link", refused)
    first, last, best = (store.folder / f"{name}.ckpt" for name in ("step_1", "last", "best"))
    save(store, 1, folder=folder)
    store.alias(last.name, first)
    store.alias(best.name, first)
    order.clear()
    second = save(store, 2, folder=folder)
    store.alias(last.name, second)
    store.prune(1)
    pairs = [(name, f"{name}.manifest.json") for name in ("step_2.ckpt", "last.ckpt")]
    assert [name for name in order if name[0] != "."] == [*pairs[0], *pairs[1], "removed"]
    assert manifest_at(last)["alias_of"] == second.name
    part = "inner/1.distcp" if folder else ""
    assert (last / part).read_bytes() == (second / part).read_bytes()
    assert damage_of(last) is None
    assert ((last / part).stat().st_ino == (second / part).stat().st_ino) is links
    # An alias is not a checkpoint of its own, and what it refers to outlives the pruning.
    assert store.all() == [second]
    assert not first.exists()
    assert damage_of(best) is None
    assert find(best) == best
    (second / part).unlink()
    missing = f"step_2.ckpt/{part}".rstrip("/")
    assert damage_of(second) == f"{missing} is missing"
    assert damage_of(last) is None


def test_a_checkpoint_as_a_user_names_it(store, tmp_path):
    path = save(store, 1)
    assert find(tmp_path / "run") == path
    assert find(str(path)) == path
    foreign = tmp_path / "foreign.ckpt"
    for zipped in (True, False):
        torch.save({}, foreign, _use_new_zipfile_serialization=zipped)
        assert find(foreign) == foreign  # it has no manifest, and that is not damage
    cut(path)
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    for named, what in ((path, "is damaged"), (tmp_path / "empty", "this run has no checkpoint")):
        problem = refusal(find, named, "checkpoint.resume_from")
        assert problem.path == f"checkpoint.resume_from={named}"
        assert what in problem.what
