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
