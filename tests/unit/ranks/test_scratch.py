"""A machine on which loader workers would fail in the middle of the training."""

import os
import resource
from types import SimpleNamespace

import pytest

from distdl.ranks import scratch
from distdl.util.errors import UserError

WORKERS = {"num_workers": 2, "image_size": 224, "batch_size": 64}


def said(data=WORKERS, ranks=2):
    return [f"{each.path}: {each.what}; {each.remedy}" for each in scratch.problems(data, ranks)]


@pytest.fixture
def long(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_a_long_tmpdir_is_refused_before_the_start(long, tmp_path, command, without_stage_2):
    (text,) = said()
    assert text.startswith(f"TMPDIR: {long} has {len(str(long))} characters")
    assert "allow 75; export TMPDIR=/tmp" in text
    assert said({"num_workers": 0}) == []
    for typed in (("data=synthetic_jpeg", "data.image_size=32"), ("doctor", "data=synthetic_jpeg")):
        more = ("model=resnet18", "data.num_classes=10", "trainer.accelerator=cpu")
        seen = command(*typed, *more, "data.num_workers=1", "trainer.devices=2")
        assert seen.code == 2
        assert "export TMPDIR=/tmp" in seen.err
        assert "Traceback" not in seen.err
    seen = command("data", "check", str(tmp_path))
    assert seen.code == 2
    assert "export TMPDIR=/tmp" in seen.err
    assert not (tmp_path / "outputs").exists()


def test_the_longest_tmpdir_that_is_allowed_works(tmp_path, monkeypatch):
    """With one more character the sockets would fail, or the limit is too strict."""
    from multiprocessing.connection import Listener

    for more in (0, 1):
        name = "/tmp/" + "y" * (scratch.LONGEST + more - len("/tmp/"))
        monkeypatch.setenv("TMPDIR", name)
        path = f"{name}/pymp-abcdefgh/listener-abcdefgh"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            assert bool(said()) == bool(more)
            if more:
                with pytest.raises(OSError, match="AF_UNIX path too long"):
                    Listener(path, "AF_UNIX")
            else:
                Listener(path, "AF_UNIX").close()
        finally:
            os.removedirs(os.path.dirname(path))


def test_other_limits_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    assert said({"num_workers": 0}) == [
        f"TMPDIR: there is no folder {tmp_path}/gone; export TMPDIR=/tmp"
    ]
    monkeypatch.setenv("TMPDIR", "/proc")
    assert "TMPDIR: /proc cannot be written: " in said()[0]
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (80, 80))
    assert said() == [
        "ulimit -n: a process may open 80 files; a rank with its loader workers needs 96; "
        "ulimit -n 4096; or fewer data.num_workers"
    ]
    monkeypatch.undo()
    small = SimpleNamespace(total=64 << 20)
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda path: small)
    assert "/dev/shm: has 64 MiB; the loaders' batches need 92" in said()[0]
    with pytest.raises(UserError, match="--shm-size=1g"):
        scratch.refuse(WORKERS, 2)
