"""`distdl drill` on two ranks: a run survives the faults, and a broken build does not."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from distdl.tools.drill.faults import FAULTS
from tests.conftest import UNCHECKED, distdl
from tests.multiprocess import drilled

MATRIX = bool(os.environ.get("DISTDL_MATRIX"))
TWO = (
    "model=net",
    "~data",
    "~optimizer",
    "~schedule",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "trainer.max_epochs=9",
    "checkpoint.monitor=null",
    "tracking=none",
)
FORGETFUL = "+callbacks.forgetful._target_=mine.Forgetful"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(drilled.__file__, tmp_path / "mine.py")
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/net.yaml").write_text("_target_: mine.Net\n")
    return tmp_path


def drill(project: Path, *arguments: str, **more):
    """The exit code, what was printed, and the rows of drill.json by their fault."""
    done = distdl("drill", *arguments, cwd=project, module=UNCHECKED, timeout=600, **more)
    printed = done.stdout + done.stderr
    newest = max(project.glob("outputs/default/drill-*/drill.json"), default=None)
    assert newest is not None, printed
    return done.returncode, printed, {r["fault"]: r for r in json.loads(newest.read_text())["rows"]}


def test_a_killed_rank_is_survived(project) -> None:
    code, printed, rows = drill(project, *TWO, "--faults", "kill_rank", "--steps", "20")
    row = rows["kill_rank"]
    print(printed)
    assert code == 0, printed
    assert row["survived"], printed
    assert (row["named"], row["rightly"]) == ("killed", True), printed
    assert (row["lost"], row["repeated"], row["difference"]) == (0, 0, 0.0), printed
    assert 0 < row["detected_s"] < row["resumed_s"], printed
    assert re.search("^kill_rank  .* bit-equal  +yes$", printed, re.M), printed


@pytest.mark.skipif(not MATRIX, reason="make matrix")
def test_a_checkpoint_without_the_generators_is_found(project) -> None:
    arguments = (*TWO, FORGETFUL, "--faults", "kill_rank", "--steps", "20")
    code, printed, rows = drill(project, *arguments)
    row = rows["kill_rank"]
    assert code == 1, printed
    assert row["survived"] is False, printed
    assert (row["lost"], row["repeated"]) == (0, 0), printed
    assert row["difference"] > 0, printed
    assert "differ by" in printed
    assert "next    python -m distdl jobs status" in printed


@pytest.mark.skipif(not MATRIX, reason="make matrix")
def test_a_run_that_fails_without_a_fault_says_why(project) -> None:
    done = distdl("drill", *TWO, "model.width=-1", cwd=project, module=UNCHECKED)
    assert done.returncode == 1
    assert "the run fails without a fault; see outputs/" in done.stdout
    assert "failed first: RuntimeError" in done.stderr, done.stderr
    assert "mine.py" in done.stderr, done.stderr


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.timeout(900)
def test_all_faults_are_survived(project) -> None:
    """Of the faults, `cut_link` needs real processes: forks would be in another network."""
    code, printed, rows = drill(project, *TWO, "--faults", ",".join({*FAULTS} - {"cut_link"}))
    print(printed)
    assert {*rows} == {*FAULTS} - {"cut_link"}, printed
    assert code == 0, printed
    assert all(row["survived"] and row["rightly"] for row in rows.values()), printed
    run = next(project.glob("outputs/default/drill-*/twin"))
    code, printed, rows = drill(project, str(run), "--faults", "cut_link", fresh=True)
    print(printed)
    (row,) = rows.values()
    assert row["survived"] if os.geteuid() == 0 else "needs root" in row["note"], printed
    assert code == (not row["survived"]), printed


PROGRAM = Path(__file__).with_name("drilled_program.py")
PROGRAM_FAULTS = ("kill_rank", "sigstop", "disk_full")
# Seeds of which each hits another rank by kill_rank and by sigstop.
SEEDS = (0, 2)


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.timeout(900)
def test_a_program_survives_and_its_report_names_the_right_rank(tmp_path) -> None:
    """Kill, stop and a full disk, each on either rank: six of six."""
    shutil.copy(PROGRAM, tmp_path / "count.py")
    named = []
    for saver in (0, 1):
        size = ("trainer.devices=2", "trainer.accelerator=cpu", "tracking=none")
        faults = ("--faults", ",".join(PROGRAM_FAULTS), "--seed", str(SEEDS[saver]))
        words = (*size, *faults, "--", "count.py", "60", str(saver))
        code, printed, rows = drill(tmp_path, *words)
        print(printed)
        assert code == 0, printed
        assert all(row["survived"] and row["rightly"] for row in rows.values()), printed
        assert all(row["files"] == "equal" for row in rows.values()), printed
        assert all(row["again_s"] < row["of_s"] for row in rows.values()), printed
        folder = max(tmp_path.glob("outputs/default/drill-*/drill.json")).parent
        for fault in PROGRAM_FAULTS:
            report = json.loads((folder / fault / "attempts/001/incident.json").read_text())
            named.append((fault, report["rank"]))
            if fault == "disk_full":
                assert report["rank"] == saver, report
    assert sorted(named) == sorted((fault, rank) for fault in PROGRAM_FAULTS for rank in (0, 1))


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.timeout(600)
def test_the_other_faults_of_a_program(tmp_path) -> None:
    shutil.copy(PROGRAM, tmp_path / "count.py")
    size = ("trainer.devices=2", "trainer.accelerator=cpu", "tracking=none")
    faults = {*FAULTS} - {*PROGRAM_FAULTS}
    words = (*size, "--faults", ",".join(sorted(faults)), "--", "count.py", "60", "0")
    code, printed, rows = drill(tmp_path, *words)
    print(printed)
    assert code == 0, printed
    for fault in ("kill_agent", "kill_host", "sigterm"):
        assert rows[fault]["survived"], printed
        assert rows[fault]["rightly"], printed
    for fault, why in (
        ("corrupt_checkpoint", "only the program knows"),
        ("cut_link", "its own affair"),
        ("tracking_down", "talks to MLflow itself"),
    ):
        assert rows[fault]["survived"] is None, printed
        assert why in rows[fault]["note"], printed


# It counts for 6 s, and for 2 s once another run has counted.
FASTER = """
import os, pathlib, sys, time
place = pathlib.Path(os.environ["DISTDL_CHECKPOINTS"])
count = place / "count.txt"
first = int(count.read_text()) if count.exists() else 0
before = pathlib.Path(sys.argv[1])
pause = 0.02 if before.exists() else 0.06
for number in range(first, 100):
    time.sleep(pause)
    (place / "new").write_text(str(number + 1))
    os.replace(place / "new", count)
before.touch()
"""


@pytest.mark.skipif(not MATRIX, reason="make matrix")
def test_a_program_that_is_faster_than_its_twin_is_hit_all_the_same(tmp_path) -> None:
    (tmp_path / "count.py").write_text(FASTER)
    size = ("trainer.devices=1", "trainer.accelerator=cpu", "tracking=none")
    words = (*size, "--faults", "kill_rank", "--", "count.py", str(tmp_path / "before"))
    code, printed, rows = drill(tmp_path, *words)
    assert code == 0, printed
    assert re.search(r"took only \d\.\d s of the program, so it is started again", printed), printed
    assert rows["kill_rank"]["survived"], printed
