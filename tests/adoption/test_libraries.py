"""examples/libraries: public Lightning libraries, those of them that are installed."""

import shutil
from pathlib import Path

import pytest

from tests.adoption.project import TASKS, command, metrics_of
from tests.conftest import ROOT

# experiment -> its package; tasks beside training; whether its data resume inside an epoch.
LIBRARIES = {
    "chemprop": ("chemprop", TASKS, True),
    "gluonts": ("gluonts", ["validate"], False),  # its module has no test_step
    "tabular": ("pytorch_tabular", TASKS, True),
    "uncertainty": ("torch_uncertainty", TASKS, True),
    "uq_box": ("lightning_uq_box", TASKS, True),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_trains_resumes_and_is_evaluated(name, tmp_path):
    package, tasks, exact = LIBRARIES[name]
    pytest.importorskip(package)
    folder = tmp_path / "libraries"
    ignored = shutil.ignore_patterns("outputs", "__pycache__")
    shutil.copytree(ROOT / "examples/libraries", folder, ignore=ignored)
    shutil.copy(Path(__file__).parent / "projects/watch.py", folder)
    words = [f"experiment={name}", "trainer.accelerator=cpu", "tracking=none"]
    words += ["+callbacks.watch._target_=watch.Watch", "checkpoint.background=false"]
    words += [f"checkpoint.every_n_steps={3 if exact else 'null'}"]
    command(*words, "name=undisturbed", cwd=folder)
    command(*words, "name=killed", cwd=folder, code=-9, KILL_AT="0 11" if exact else "0 25")
    runs = folder / "outputs" / name
    command("resume", str(runs / "killed"), cwd=folder)
    results = [metrics_of(runs / run) for run in ("undisturbed", "killed")]
    values = [{k: v for k, v in each.items() if "perf" not in k} for each in results]
    assert values[0] == values[1] if exact else values[0].keys() == values[1].keys()
    for task in tasks:
        command("resume", str(runs / "killed"), f"task={task}", cwd=folder)
