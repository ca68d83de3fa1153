"""`prepare` killed, refused, out of space: nothing is lost, nothing half done taken for whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from distdl.datasets import shard_plan as plans
from distdl.datasets import work
from distdl.util.atomic_files import atomic_file
from distdl.util.errors import Unfinished, UserError
from tests.conftest import ROOT, environment
from tests.miniature import SUBSET, everything, imagenet, images, prepare, stored


# The killed one is a process group of its own: what it leaves behind can be counted.
def start(source: Path, to: Path) -> subprocess.Popen[str]:
    command = ("prepare", "imagenet", "--source", str(source), "--to", str(to), "--subset")
    return subprocess.Popen(
        [sys.executable, "-m", "distdl", *command, "--shard-mb", "0.005", "--workers", "2"],
        cwd=ROOT,
        env=environment(),
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for(what: Any, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def is_alive(group: int) -> bool:
    """Whether any process of a group still runs; a container's init may be slow to bury them."""
    for process in psutil.process_iter(["pid", "status"]):
        with suppress(ProcessLookupError):
            mine = os.getpgid(process.info["pid"]) == group
            if mine and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


def test_killed_twice_it_goes_on_and_ends_the_same(tmp_path):
    source, out, work = (
        imagenet(tmp_path / "in", 100),
        tmp_path / "out",
        tmp_path / "out/.preparing",
    )
    seen = 0
    for _ in range(2):
        process = start(source, out)
        wait_for(lambda: len(list(work.glob("*.json"))) >= seen + 3)  # noqa: B023
        process.kill()
        assert process.wait() == -9
        # Its workers end by themselves, and do not wait for work for ever.
        wait_for(lambda: not is_alive(process.pid))  # noqa: B023
        seen = len(list(work.glob("*.json")))
        assert not (out / "dataset.json").exists()
    done = {path.stem: path.stat().st_mtime_ns for path in work.glob("*.json")}
    times = {name: (out / f"{name}.tar").stat().st_mtime_ns for name in done}

    process = start(source, out)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert f"goes on: {len(done)} of " in text
    assert {name: (out / f"{name}.tar").stat().st_mtime_ns for name in done} == times
    in_one_go = tmp_path / "in_one_go"
    prepare("imagenet", source, in_one_go, "--subset", "--shard-mb", "0.005", "--workers", "1")
    assert everything(out) == everything(in_one_go)


def half_done(tars: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops after the second shard, as Ctrl-C would."""
    from distdl.datasets.writers import Writer

    whole, parts = Writer.write, []

    def write(self: Writer, part: plans.Part, advance: Any) -> None:
        if len(parts) == 2:
            raise KeyboardInterrupt
        parts.append(part)
        whole(self, part, advance)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", write)
        with pytest.raises(KeyboardInterrupt):
            prepare("imagenet", tars, out, *SUBSET)


def test_half_done_other_options_are_refused(tars, tmp_path, monkeypatch):
    out = tmp_path / "out"
    half_done(tars, out, monkeypatch)
    before = everything(out)
    with pytest.raises(UserError, match=r"images.max_side was null, is 9; seed was 0, is 7"):
        prepare("imagenet", tars, out, *SUBSET, "--seed", "7", "--max-side", "9")
    other = imagenet(tmp_path / "other", 13)
    with pytest.raises(UserError, match=r"source.files.ILSVRC2012_img_train.tar was \d+, is \d+"):
        prepare("imagenet", other, out, *SUBSET)
    assert everything(out) == before
    # A tar that is gone or short is written again, whatever was noted.
    (out / "train-00000.tar").write_bytes(b"short")
    prepare("imagenet", tars, out, *SUBSET)
    assert len(stored(out, "train")) == 36


def test_two_at_once_are_refused(tars, tmp_path, monkeypatch):
    half_done(tars, tmp_path / "out", monkeypatch)
    with (
        FileLock(tmp_path / "out/.preparing/lock"),
        pytest.raises(UserError, match="another command is preparing"),
    ):
        prepare("imagenet", tars, tmp_path / "out", *SUBSET)


def test_what_is_complete_is_not_touched(tars, prepared, capsys, tmp_path):
    before = everything(prepared)
    prepare("imagenet", tars, prepared, *SUBSET, "--upload", str(tmp_path / "there"))
    assert "is prepared already" in capsys.readouterr().out
    assert everything(prepared) == before == everything(tmp_path / "there")
    with pytest.raises(UserError, match="seed was 0, is 1"):
        prepare("imagenet", tars, prepared, *SUBSET, "--seed", "1")


def test_a_data_set_that_was_prepared_with_restart_markers_is_complete(
    tars, prepared, capsys, tmp_path
):
    old = shutil.copytree(prepared, tmp_path / "old")
    manifest = json.loads((old / "dataset.json").read_text())
    manifest["made"]["settings"]["images"]["restart_markers"] = True
    (old / "dataset.json").write_text(json.dumps(manifest))
    prepare("imagenet", tars, old, *SUBSET)
    assert "is prepared already" in capsys.readouterr().out


def test_where_nothing_can_be_written_nothing_was_done(tars):
    with pytest.raises(UserError, match="cannot write /proc/out") as refused:
        prepare("imagenet", tars, Path("/proc/out"), *SUBSET)
    assert refused.value.outcome == "nothing was started"


def test_somebody_elses_folder_is_refused(tars, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"not empty: thesis.tex"):
        prepare("imagenet", tars, tmp_path, *SUBSET)
    assert everything(tmp_path) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize(
    ("kind", "name", "more", "workers"),
    [
        ("folder", "train/n02102040/n02102040_101.JPEG", 0, "1"),  # other bytes, as many
        ("folder", "train/n02102040/n02102040_101.JPEG", 7, "2"),
        ("imagenet", "ILSVRC2012_img_train.tar", 0, "1"),
    ],
)
def test_a_change_after_the_plan_ends_it(kind, name, more, workers, tmp_path, monkeypatch):
    source, out = imagenet(tmp_path / "source", 4), tmp_path / "out"
    for split in ("train", "val"):
        for wnid, found in images(4).items():
            (source / split / wnid).mkdir(parents=True)
            for image, data in found.items():
                (source / split / wnid / image).write_bytes(data)
    file, save = source / name, plans.ShardPlan.save
    kept, stat = file.read_bytes(), file.stat()

    def save_and_change(plan: plans.ShardPlan, path: Path) -> None:
        save(plan, path)
        file.write_bytes(kept[:-200] + bytes(200 + more))

    options = ["--skip-damaged", "--workers", workers, "--shard-mb", "0.02"]
    options += ["--subset"] if kind == "imagenet" else []
    with monkeypatch.context() as patch:
        patch.setattr(plans.ShardPlan, "save", save_and_change)
        with pytest.raises(Unfinished, match=f"{file} has changed since it was planned"):
            prepare(kind, source, out, *options)
    assert not (out / "dataset.json").exists()
    with pytest.raises(UserError, match=r"has changed since|from the beginning: --to DIR"):
        prepare(kind, source, out, *options)
    file.write_bytes(kept)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert prepare(kind, source, out, *options) == 0
    assert file.suffix == ".tar" or kept in [data for data, _ in stored(out, "train").values()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_is_said_and_mended(tars, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small", str(disk)])
    if made.returncode:
        pytest.skip("cannot mount here")
    try:
        # Lossy, so that its size is not known before.
        options = (*SUBSET, "--max-side", "60")
        with pytest.raises(Unfinished, match=r"No space left(.|\n)*goes on where it was"):
            prepare("imagenet", tars, disk / "out", *options)
        assert not (disk / "out" / "dataset.json").exists()
        assert not list((disk / "out").rglob("*.part"))
        with pytest.raises(UserError, match="are needed"):
            prepare("imagenet", tars, disk / "other", *SUBSET)
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        prepare("imagenet", tars, disk / "out", *options)
        assert len(stored(disk / "out", "train")) == 36
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_has_its_name_only_when_it_is_complete(tmp_path, replace):
    path = tmp_path / "file"
    with pytest.raises(ZeroDivisionError), atomic_file(path, replace=replace) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
        _ = 1 / 0
    assert everything(tmp_path) == {}
    with atomic_file(path, replace=replace) as file:
        file.write(b"old")
    refused: Any = nullcontext() if replace else pytest.raises(FileExistsError)
    with refused, atomic_file(path, replace=replace) as file:
        file.write(b"new")
    assert everything(tmp_path) == {"file": b"new" if replace else b"old"}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More images than two idle cores prepare in a second or two."""
    return imagenet(tmp_path_factory.mktemp("many"), 1000)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_it_with_a_sentence(number, many, tmp_path):
    source = many
    # While its workers start, and while they work.
    for sign in ("plan.jsonl", "*.json"):
        out = tmp_path / f"out-{sign[0]}"
        process = start(source, out)
        wait_for(lambda: list((out / ".preparing").glob(sign)))  # noqa: B023
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        text, _ = process.communicate(timeout=60)
        # Python ends by the signal itself if it came while a class was being made from text, as
        # dataclasses are: a shell shows both as 130.
        assert process.returncode in (130, -signal.SIGINT), text
        assert text.endswith("interrupted: the same command resumes where it stopped\n"), text
        wait_for(lambda: not is_alive(process.pid))  # noqa: B023


@pytest.mark.parametrize("moment", ["wait", "ProcessPoolExecutor"])
def test_ctrl_c_interrupts_no_wait_for_a_lock_and_no_new_pool(moment, tmp_path, monkeypatch):
    """`RuntimeError: release unlocked lock`, or a line about a leaked semaphore, was the last that
    a user read, once in some hundred times."""
    real, passed = getattr(work, moment), []

    def interrupted(*args: Any, **kw: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # the handler runs in here
        passed.append(True)
        return real(*args, **kw)

    monkeypatch.setattr(work, moment, interrupted)
    before = signal.getsignal(signal.SIGINT)
    source = imagenet(tmp_path / "in", 20)
    options = ("--subset", "--shard-mb", "0.005", "--workers", "2")
    with pytest.raises(KeyboardInterrupt, match="the same command resumes"):
        prepare("imagenet", source, tmp_path / "out", *options)
    assert passed == [True] and signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_does_not_reach_the_workers_not_even_while_they_start(tmp_path):
    process = start(imagenet(tmp_path / "in", 100), tmp_path / "out")

    def workers() -> list[psutil.Process]:
        children = psutil.Process(process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    wait_for(lambda: len(workers()) == 2)
    for worker in workers():
        worker.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in text, text
