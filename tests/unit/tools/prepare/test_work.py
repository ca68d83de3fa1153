"""`prepare` killed, refused, out of space: nothing is lost; unfinished files do not count."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from distdl.tools.prepare.shard_plan import ShardPlan
from distdl.util.errors import Unfinished, UserError
from tests import prepared as fixtures
from tests.conftest import ROOT, environment
from tests.miniature import SUBSET, everything, imagenet, prepare, stored, unpack
from tests.prepared import refusal
from tests.waiting import until

small_disk = fixtures.small_disk
QUICK = ("--subset", "--shard-mb", "0.005", "--workers")


def start(source, to):
    """Starts it as a process group of its own: the processes that it leaves can be counted."""
    command = ("prepare", "imagenet", "--source", str(source), "--to", str(to), *QUICK, "2")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    words = [sys.executable, "-m", "distdl", *command]
    return subprocess.Popen(words, cwd=ROOT, env=environment(), text=True, **streams)


def is_gone(group):
    """Whether no process of a group runs; a container's init may be slow to collect them."""
    for process in psutil.process_iter(["pid", "status"]):
        with suppress(ProcessLookupError):
            member = os.getpgid(process.info["pid"]) == group
            if member and process.info["status"] != psutil.STATUS_ZOMBIE:
                return False
    return True


@pytest.fixture(scope="module", params=[1000])
def many(request, tmp_path_factory):
    """More images than two idle cores prepare in a second or two."""
    return imagenet(tmp_path_factory.mktemp("many"), request.param)


@pytest.mark.parametrize("many", [100], indirect=True)
def test_killed_twice_it_resumes_and_ends_the_same(many, tmp_path):
    out = tmp_path / "out"
    parts = []

    def written():
        return list((out / ".preparing").glob("*.json"))

    for _ in range(2):
        process = start(many, out)
        until(lambda: len(written()) >= len(parts) + 3)  # noqa: B023
        process.kill()
        assert process.wait() == -9
        # Its workers end by themselves, and do not wait for work for ever.
        until(lambda: is_gone(process.pid))  # noqa: B023
        parts = written()
        assert not (out / "dataset.json").exists()
        with FileLock(out / ".preparing/lock"):
            what = refusal(prepare, "imagenet", many, out, *QUICK, "1").what
            assert "another command is preparing" in what
    tars = {out / f"{part.stem}.tar" for part in parts}
    tars.pop().write_bytes(b"short")  # it is written again
    times = {path: path.stat().st_mtime_ns for path in tars}
    process = start(many, out)

    def workers():
        children = psutil.Process(process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    # Ctrl-C reaches a terminal's whole group, but not the workers, not even while they start.
    until(lambda: len(workers()) == 2)
    for worker in workers():
        worker.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert "Traceback" not in text, text
    assert f": {len(tars)} of " in text
    assert {path: path.stat().st_mtime_ns for path in tars} == times
    prepare("imagenet", many, tmp_path / "in_one_go", *QUICK, "1")
    assert everything(out) == everything(tmp_path / "in_one_go")


def test_a_complete_data_set_and_other_files_are_not_touched(tars, prepared, capsys, tmp_path):
    with pytest.raises(UserError) as error:
        prepare("imagenet", tars, Path("/proc/out"), *SUBSET)
    assert error.value.problems[0].path == "--to"
    assert type(error.value) is UserError
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    problem = refusal(prepare, "imagenet", tars, tmp_path / "mine", *SUBSET)
    assert "not empty: thesis.tex" in problem.what
    assert everything(tmp_path / "mine") == {"thesis.tex": b"years of work"}
    before = everything(prepared)
    prepare("imagenet", tars, prepared, *SUBSET, "--upload", str(tmp_path / "there"))
    assert everything(prepared) == before == everything(tmp_path / "there")
    assert refusal(prepare, "imagenet", tars, prepared, *SUBSET, "--seed", "1").path == "--to"
    assert "is prepared already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "name", "more", "workers"),
    [
        ("folder", "train/n02102040/n02102040_101.JPEG", 0, "1"),  # other bytes, as many
        ("folder", "train/n02102040/n02102040_101.JPEG", 7, "2"),
        ("imagenet", "ILSVRC2012_img_train.tar", 0, "1"),
    ],
)
def test_a_change_after_the_plan_ends_it(kind, name, more, workers, tmp_path, monkeypatch):
    source = imagenet(tmp_path / "source", 4)
    out = tmp_path / "out"
    unpack(source, 4, splits=("train", "val"))
    file = source / name
    save = ShardPlan.save
    intact = file.read_bytes()
    stat = file.stat()

    def save_and_change(plan, path):
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
    def resize(size):
        subprocess.run(["mount", "-o", f"remount,size={size}", str(small_disk)], check=True)

    out = small_disk / "out"
    options = (*SUBSET, "--max-side", "60")  # lossy: its size is unknown
    resize("64k")
    with pytest.raises(Unfinished, match="No space left") as error:
        prepare("imagenet", tars, out, *options)
    assert "the same command" in error.value.problems[0].remedy
    assert not (out / "dataset.json").exists()
    assert not list(out.rglob("*.part"))
    assert "are needed" in refusal(prepare, "imagenet", tars, small_disk / "other", *SUBSET).what
    resize("4m")
    prepare("imagenet", tars, out, *options)
    assert len(stored(out, "train")) == 36


@pytest.mark.parametrize(
    ("send", "number", "sign"),
    [(os.killpg, signal.SIGINT, "plan.jsonl"), (os.kill, signal.SIGTERM, "*.json")],
    ids=["Ctrl-C while its workers start", "SIGTERM while they work"],
)
def test_ctrl_c_and_sigterm_end_it_with_a_sentence(send, number, sign, many, tmp_path):
    process = start(many, tmp_path / "out")
    until(lambda: list((tmp_path / "out/.preparing").glob(sign)))
    send(process.pid, number)
    text, _ = process.communicate(timeout=60)
    # Python ends by the signal itself if it came while a class was being created from text, as
    # dataclasses are: a shell shows both as 130.
    assert process.returncode in (130, -signal.SIGINT), text
    assert text.endswith("interrupted: the same command resumes where it stopped\n"), text
    until(lambda: is_gone(process.pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_library_swallows_ends_it_as_well(number, tars, tmp_path, monkeypatch):
    save = ShardPlan.save

    def save_interrupted(plan, path):
        save(plan, path)
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ShardPlan, "save", save_interrupted)
    with pytest.raises(KeyboardInterrupt, match="the same command resumes where it stopped"):
        prepare("imagenet", tars, tmp_path / "out", *SUBSET, "--workers", "2")
    assert not (tmp_path / "out/dataset.json").exists()
