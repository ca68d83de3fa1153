"""examples/libraries: public Lightning libraries, those of them that are installed."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.adoption import warm
from tests.adoption.project import TASKS, metrics_of
from tests.conftest import ROOT

# experiment -> its package; tasks beside training; whether its data resume inside an epoch.
LIBRARIES = {
    "chemprop": ("chemprop", TASKS, True),
    "gluonts": ("gluonts", ["validate"], False),  # its module has no test_step
    "tabular": ("pytorch_tabular", TASKS, True),
    "uncertainty": ("torch_uncertainty", TASKS, True),
    "uq_box": ("lightning_uq_box", TASKS, True),
}
KILLER = """
import os
from lightning.pytorch import Callback

class Killer(Callback):
    def on_train_batch_start(self, trainer, *_):
        if os.environ.get("KILL_AT") == str(trainer.fit_loop.epoch_loop.batch_progress.total.ready):
            os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not importlib.util.find_spec(package), reason=f"{package} is not installed"
            ),
        )
        for name, (package, *_) in LIBRARIES.items()
    ],
)
def test_trains_goes_on_and_is_evaluated(name: str, tmp_path: Path) -> None:
    _, tasks, exact = LIBRARIES[name]
    folder = tmp_path / "libraries"
    ignored = shutil.ignore_patterns("outputs", "__pycache__")
    shutil.copytree(ROOT / "examples/libraries", folder, ignore=ignored)
    (folder / "killer.py").write_text(KILLER)
    given = [f"experiment={name}", "trainer.accelerator=cpu", "tracking=none"]
    given += ["+callbacks.killer._target_=killer.Killer", "checkpoint.background=false"]
    given += [f"checkpoint.every_n_steps={3 if exact else 'null'}"]
    ended = warm.command(*given, "name=undisturbed", cwd=folder)
    assert ended.well, ended.output
    ended = warm.command(*given, "name=killed", cwd=folder, KILL_AT="11" if exact else "25")
    assert ended.codes == [-9], ended.output
    runs = folder / "outputs" / name
    ended = warm.command("resume", str(runs / "killed"), cwd=folder)
    assert ended.well, ended.output
    found = [metrics_of(runs / run) for run in ("undisturbed", "killed")]
    values = [{k: v for k, v in each.items() if "perf" not in k} for each in found]
    assert values[0] == values[1] if exact else values[0].keys() == values[1].keys()
    for task in tasks:
        ended = warm.command("resume", str(runs / "killed"), f"task={task}", cwd=folder)
        assert ended.well, ended.output
        print(name, task, metrics_of(runs / "killed"))
