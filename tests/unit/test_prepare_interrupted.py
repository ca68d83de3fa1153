"""`prepare` killed, refused, out of space: nothing is lost; unfinished files do not count."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from distdl.datasets import work
from distdl.datasets.shard_plan import ShardPlan
from distdl.datasets.writers import Writer
from distdl.util.errors import Unfinished, UserError
from tests import prepared as fixtures
from tests.conftest import ROOT, environment
from tests.miniature import SUBSET, everything, imagenet, prepare, stored, unpack
from tests.prepared import refusal, wait_until

small_disk = fixtures.small_disk
QUICK = ("--subset", "--shard-mb", "0.005", "--workers")


def start(source: Path, to: Path) -> subprocess.Popen[str]:
    """Starts it as a process group of its own: the processes that it leaves can be counted."""
    command = ("prepare", "imagenet", "--source", str(source), "--to", str(to))
    return subprocess.Popen(
        [sys.executable, "-m", "distdl", *command, *QUICK, "2"],
        cwd=ROOT,
        env=environment(),
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def is_gone(group: int) -> bool:
    """Whether no process of a group runs; a container's init may be slow to collect them."""
    for process in psutil.process_iter(["pid", "status"]):
        with suppress(ProcessLookupError):
            member = os.getpgid(process.info["pid"]) == group
            if member and process.info["status"] != psutil.STATUS_ZOMBIE:
                return False
    return True


@pytest.fixture(scope="module", params=[1000])
def many(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More images than two idle cores prepare in a second or two."""
    return imagenet(tmp_path_factory.mktemp("many"), request.param)


@pytest.mark.parametrize("many", [100], indirect=True)
def test_killed_twice_it_resumes_and_ends_the_same(many, tmp_path):
    out = tmp_path / "out"
    parts: list[Path] = []

    def written() -> list[Path]:
        return list((out / ".preparing").glob("*.json"))

    for _ in range(2):
        process = start(many, out)
        wait_until(lambda: len(written()) >= len(parts) + 3)  # noqa: B023
        process.kill()
        assert process.wait() == -9
        # Its workers end by themselves, and do not wait for work for ever.
        wait_until(lambda: is_gone(process.pid))  # noqa: B023
        parts = written()
        assert not (out / "dataset.json").exists()
    tars = {out / f"{part.stem}.tar" for part in parts}
    times = {path: path.stat().st_mtime_ns for path in tars}
    process = start(many, out)

    def workers() -> list[psutil.Process]:
        children = psutil.Process(process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    # Ctrl-C reaches a terminal's whole group, but not the workers, not even while they start.
    wait_until(lambda: len(workers()) == 2)
    for worker in workers():
        worker.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in text, text
    assert f": {len(parts)} of " in text
    assert {path: path.stat().st_mtime_ns for path in tars} == times
    prepare("imagenet", many, tmp_path / "in_one_go", *QUICK, "1")
    assert everything(out) == everything(tmp_path / "in_one_go")


@pytest.fixture
def half(tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A preparation that was interrupted after the second shard."""
    real, parts = Writer.write, []

    def write(self: Writer, part: Any, advance: Any) -> None:
        if len(parts) == 2:
            raise KeyboardInterrupt
        parts.append(part)
        real(self, part, advance)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", write)
        with pytest.raises(KeyboardInterrupt):
            prepare("imagenet", tars, tmp_path / "out", *SUBSET)
    return tmp_path / "out"


def test_an_interrupted_preparation_accepts_only_the_same_command(tars, half, tmp_path):
    before = everything(half)
    changed = (*SUBSET, "--seed", "7", "--max-side", "9")
    problem = refusal(prepare, "imagenet", tars, half, *changed)
    assert problem.path == "--to"
    assert problem.what.endswith("images.max_side was null, is 9; seed was 0, is 7")
    other = imagenet(tmp_path / "other", 13)
    what = refusal(prepare, "imagenet", other, half, *SUBSET).what
    assert "source.files.ILSVRC2012_img_train.tar was " in what
    with FileLock(half / ".preparing/lock"):
        problem = refusal(prepare, "imagenet", tars, half, *SUBSET)
        assert "another command is preparing" in problem.what
    assert everything(half).keys() - before.keys() <= {".preparing/lock"}
    # A tar that is missing or short is written again.
    (half / "train-00000.tar").write_bytes(b"short")
    prepare("imagenet", tars, half, *SUBSET)
    assert len(stored(half, "train")) == 36


def test_a_complete_data_set_and_other_files_are_not_touched(tars, prepared, capsys, tmp_path):
    with pytest.raises(UserError) as error:
        prepare("imagenet", tars, Path("/proc/out"), *SUBSET)
    assert error.value.problems[0].path == "--to" and type(error.value) is UserError
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    problem = refusal(prepare, "imagenet", tars, tmp_path / "mine", *SUBSET)
    assert "not empty: thesis.tex" in problem.what
    assert everything(tmp_path / "mine") == {"thesis.tex": b"years of work"}
    before = everything(prepared)
    prepare("imagenet", tars, prepared, *SUBSET, "--upload", str(tmp_path / "there"))
    assert everything(prepared) == before == everything(tmp_path / "there")
    assert refusal(prepare, "imagenet", tars, prepared, *SUBSET, "--seed", "1").path == "--to"
    # An option of earlier versions, restart markers, makes no difference.
    old = shutil.copytree(prepared, tmp_path / "old")
    manifest = json.loads((old / "dataset.json").read_text())
    manifest["made"]["settings"]["images"]["restart_markers"] = True
    (old / "dataset.json").write_text(json.dumps(manifest))
    prepare("imagenet", tars, old, *SUBSET)
    assert capsys.readouterr().out.count("is prepared already") == 2


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
    unpack(source, 4, splits=("train", "val"))
    file, save = source / name, ShardPlan.save
    intact, stat = file.read_bytes(), file.stat()

    def save_and_change(plan: ShardPlan, path: Path) -> None:
        save(plan, path)
        file.write_bytes(intact[:-200] + bytes(200 + more))

    options = ["--skip-damaged", "--workers", workers, "--shard-mb", "0.02"]
    options += ["--subset"] if kind == "imagenet" else []
    with monkeypatch.context() as patch:
        patch.setattr(ShardPlan, "save", save_and_change)
        with pytest.raises(Unfinished, match=f"{file} has changed since it was planned"):
            prepare(kind, source, out, *options)
    assert not (out / "dataset.json").exists()
    refusal(prepare, kind, source, out, *options)
    file.write_bytes(intact)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert prepare(kind, source, out, *options) == 0
    assert file.suffix == ".tar" or intact in [data for data, _ in stored(out, "train").values()]


def test_a_full_disk_is_reported_and_the_work_resumes(tars, small_disk):
    def resize(size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(small_disk)], check=True)

    out, options = small_disk / "out", (*SUBSET, "--max-side", "60")  # lossy: its size is unknown
    resize("64k")
    with pytest.raises(Unfinished, match="No space left") as error:
        prepare("imagenet", tars, out, *options)
    assert "the same command" in error.value.problems[0].remedy
    assert not (out / "dataset.json").exists() and not list(out.rglob("*.part"))
    assert "are needed" in refusal(prepare, "imagenet", tars, small_disk / "other", *SUBSET).what
    resize("4m")
    prepare("imagenet", tars, out, *options)
    assert len(stored(out, "train")) == 36


@pytest.mark.parametrize(
    "send", [lambda pid: os.killpg(pid, signal.SIGINT), lambda pid: os.kill(pid, signal.SIGTERM)]
)
@pytest.mark.parametrize("sign", ["plan.jsonl", "*.json"])  # its workers start; they work
def test_ctrl_c_and_sigterm_end_it_with_a_sentence(
    send: Callable[[int], None], sign, many, tmp_path
):
    process = start(many, tmp_path / "out")
    wait_until(lambda: list((tmp_path / "out" / ".preparing").glob(sign)))
    send(process.pid)
    text, _ = process.communicate(timeout=60)
    # Python ends by the signal itself if it came while a class was being created from text, as
    # dataclasses are: a shell shows both as 130.
    assert process.returncode in (130, -signal.SIGINT), text
    assert text.endswith("interrupted: the same command resumes where it stopped\n"), text
    wait_until(lambda: is_gone(process.pid))


@pytest.mark.parametrize("moment", ["wait", "ProcessPoolExecutor"])
def test_ctrl_c_interrupts_no_wait_for_a_lock_and_no_new_pool(moment, tars, tmp_path, monkeypatch):
    """Sometimes the last line was `release unlocked lock`, or of a leaked semaphore."""
    real, passed = getattr(work, moment), []

    def interrupted(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # the handler runs in here
        passed.append(True)
        return real(*args, **options)

    monkeypatch.setattr(work, moment, interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="the same command resumes"):
        prepare("imagenet", tars, tmp_path / "out", *QUICK, "2")
    assert passed == [True] and signal.getsignal(signal.SIGINT) == before
