"""The parts of CONTRIBUTING, word for word: in a project, and in a copy of distdl itself."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT, matrix_only, python, status
from tests.unit.test_docs import FENCE
from tests.written import write

PAGES = ("CONTRIBUTING.md", "docs/data.md")
FILES = {p: text for page in PAGES for _, p, text in FENCE.findall((ROOT / page).read_text()) if p}
# A task of somebody's that needs no built run.
HOSTS = """
from distdl.tasks import Task, Unbuilt
class Hosts(Task[Unbuilt]):
    needs_build = False
    def __init__(self, least: int):
        self.least = least
    def run(self, context):
        print("ranks", context.context.environment.world_size, "of", self.least)
        return {"hosts": 1}
"""
# In distdl itself each is in the package of its kind.
PACKAGES = {
    "brightness": "domains",
    "greys": "data",
    "gauge": "models",
    "halving": "optim",
    "squares": "data",
    "count": "tasks",
    "timed": "tasks",
    "mlp": "models",
}
CPU = ["trainer.accelerator=cpu", "tracking=none"]
TRAIN = [
    "model=mlp",
    "data=squares",
    "schedule=halving",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=5",
    "name=x",
    *CPU,
]
COMMANDS = f"""
import sys
from distdl.cli.main import main
from distdl import tasks
codes = [main({TRAIN})]
# A resume could not train in another precision.
codes += [main(["resume", "outputs/default/x", "task=timed", "trainer.precision=bf16-mixed"])]
codes += [main(["model=mlp", "data=squares", "task=count", "name=y", *{CPU}])]
# A domain of its own: trains, validates and predicts; another domain's model is refused.
domain = ["model=gauge", "data=greys", "schedule.warmup_epochs=0", "optimizer.lr=2", *{CPU}]
codes += [main([*domain, "trainer.max_epochs=2", "name=z"])]
codes += [main(["resume", "outputs/default/z", "task=predict", "task.format=csv"])]
codes += [main(["model=gauge", "data=synthetic", "name=other", *{CPU}])]
hosts = ["task._target_=mine.hosts.Hosts", *{CPU}]
if sys.argv[1] == "project":
    assert [main(hosts), main([*hosts, "+task.least=1"])] == [2, 0]
print("codes", codes, tasks.__file__)
"""


@pytest.mark.parametrize("home", ["project", pytest.param("distdl", marks=matrix_only)])
def test_parts_added_as_contributing_says_work(tmp_path, home):
    work, copy = tmp_path / "work", tmp_path / "copy"
    work.mkdir()
    source = ROOT / "src"
    if home == "project":
        write(work, {**FILES, "mine/__init__.py": "", "mine/hosts.py": HOSTS})
    else:
        for part in ("src", "conf", "launchers"):
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, copy / part, ignore=skipped)
        source = copy / "src"
        write(copy, {in_distdl(Path(name)): moved(text) for name, text in FILES.items()})
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = python("-c", COMMANDS, home, cwd=work, env=env)
    said = done.stdout + done.stderr
    assert f"codes [0, 0, 0, 0, 0, 2] {source}" in done.stdout, said
    assert "parameters 1.9" in done.stdout, said
    assert "seconds " in done.stdout, said
    assert home == "distdl" or "done    hosts 1\n" in done.stdout, said
    if home == "project":
        assert "ranks 1 of 1" in done.stdout
        assert "task.least: missing" in done.stderr
    assert "gives samples of classification, and Gauge learns brightness" in done.stderr
    third = work / "outputs/default/z"
    (part,) = (third / "predictions").glob("*.csv")
    head, first, *others = part.read_text().splitlines()
    assert head == "name,truth,brightness,error"
    assert first.startswith("grey 0,0.0,")
    assert len(others) == 98
    best = json.loads((third / "checkpoints/best.ckpt.manifest.json").read_text())
    assert best["metrics"]["val/error"] < 0.3, "chosen by the domain's own metric, the least"
    lines = (work / "outputs/default/x/logs/metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line)["metrics"] for line in lines]
    rates = [each["lr"] for each in logged if "lr" in each]
    assert sum("val/loss" in each for each in logged) == 1, "an evaluation adds no point"
    assert sum("Timed/val/loss" in each for each in logged) == 1
    assert rates == [rates[0], rates[0] / 2, rates[0] / 2, rates[0] / 4], "halved per half epoch"
    assert status(work / "outputs/default/x", 2)["state"] == "SUCCEEDED"


def in_distdl(path):
    if path.suffix == ".py" and path.parts[0] == "mine":
        return f"src/distdl/{PACKAGES[path.stem]}/{path.name}"
    return str(path)


def moved(text):
    for name, package in PACKAGES.items():
        text = text.replace(f"mine.{name}", f"distdl.{package}.{name}")
    return text
