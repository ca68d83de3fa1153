"""examples/my_project: a user's own module, data and configs, from its folder."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, distdl, losses


@pytest.fixture
def project(tmp_path) -> Path:
    target = tmp_path / "my_project"
    shutil.copytree(ROOT / "examples/my_project", target, ignore=shutil.ignore_patterns("outputs"))
    return target


def test_runs_from_its_folder_by_the_installed_command(project) -> None:
    done = distdl(
        "experiment=forecast",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "name=x",
        "tracking=none",
        "trainer.log_every_n_steps=1",
        cwd=project,
        module=(str(Path(sys.executable).parent / "distdl"),),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = project / "outputs/forecast/x"
    manifest = json.loads((run / "checkpoints/best.ckpt.manifest.json").read_text())
    assert manifest["metrics"]["val/mse"] < 0.02
    assert "the model's own configure_optimizers" in done.stdout
    # 2,000 windows in batches of 50 per device, five epochs.
    assert len(losses(run)) == 5 * 2000 // (50 * 2)
