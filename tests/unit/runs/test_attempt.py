"""An attempt, and a copy of its folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from distdl.job import JobState
from distdl.runs.attempt import Attempt


def test_a_copied_folder_is_not_the_run_that_runs(tmp_path):
    attempt = Attempt(tmp_path / "run/attempts/001")
    attempt.path.mkdir(parents=True)
    attempt.begin()
    assert attempt.state() is JobState.RUNNING
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = Attempt(tmp_path / "copy/attempts/001")
    assert copy.state() is JobState.FAILED
    assert not copy.is_under_way()
    assert copy.copy_of(copy.status()) == str(attempt.path)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert Attempt(tmp_path / "moved/attempts/001").state() is JobState.RUNNING
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert Attempt(tmp_path / "link/attempts/001").state() is JobState.RUNNING
    assert os.getpid() == attempt_of(tmp_path / "moved")["pid"]


def attempt_of(run: Path) -> dict[str, object]:
    return Attempt(run / "attempts/001").status()
