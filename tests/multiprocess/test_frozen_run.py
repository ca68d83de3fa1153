"""A run that an old commit (96581e3) made is resumed as that commit would have resumed it.

tests/fixtures/frozen_run/run: two ranks of `strategy=ddp`, killed (-9) in the middle of the second
epoch (see its mine.py). `losses.json` holds what that commit's own resume logged afterwards. One
thing was edited: the path of the project in launch.yaml.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import distdl, losses, status

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "frozen_run"


def test_it_is_resumed_with_the_very_losses(tmp_path: Path) -> None:
    run = tmp_path / "outputs/default/frozen"
    shutil.copytree(FIXTURE / "run", run)
    shutil.copy(FIXTURE / "mine.py", tmp_path)
    before = (run / "config.yaml").read_bytes()
    done = distdl("resume", str(run), f"project.root={tmp_path}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert status(run, 2)["state"] == "SUCCEEDED"
    assert (run / "config.yaml").read_bytes() == before
    expected = json.loads((FIXTURE / "losses.json").read_text())
    logged = losses(run)
    assert {step: logged[int(step)] for step in expected} == pytest.approx(expected, rel=1e-6)
