"""A launcher in a package of somebody else: docs/own_launcher.md, word for word."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest

from tests.conftest import ROOT, TINY, UNCHECKED, distdl, last_step, losses, matrix_only
from tests.waiting import until
from tests.written import write

FENCE = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = dict(FENCE.findall((ROOT / "docs/own_launcher.md").read_text()))
CONF = {name: text for name, text in FILES.items() if name.startswith("conf/")}
CODE = {name: text for name, text in FILES.items() if name not in CONF}
ALLOW = "project.allow=[my_launchers]"
LAUNCHER = ("launcher=background", ALLOW, "follow=false")
CPU = ("debug=cpu", "trainer.devices=2")
RANKS = 2 if "DISTDL_MATRIX" in os.environ else 1  # a rank takes seconds to start here
# A class of the user's own project, which must be in the bundle; it says whose code it runs with.
MINE = """
import distdl
from lightning.pytorch import Callback
class Witness(Callback):
    def on_train_start(self, trainer, module):
        print("ours:", distdl.__file__, "mine:", __file__, flush=True)
"""
# More launchers, in the project; one derives from distdl's base class.
MORE = """
from distdl.job import LauncherBase
from distdl.util.errors import Problem, UserError
from my_launchers.background import BackgroundLauncher, BackgroundRequest
class Away(BackgroundLauncher):
    def reach(self, request):
        raise UserError(Problem("launcher", "nobody is there"))
class Full(BackgroundLauncher):
    def submit(self, request):
        raise UserError(Problem("launcher", "the queue is full"))
class Sleeps(BackgroundRequest):
    command = ["sleep", "0.2"]
class Alone(BackgroundLauncher, LauncherBase):
    in_turn = True
    def request(self, spec):
        return Sleeps(spec, 10)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Somebody's project with the page's options in its ./conf, and beside it the page's package,
    in a folder that an editable install would put on Python's path."""
    folder = tmp_path_factory.mktemp("own")
    write(folder / "package", {**CODE, "my_launchers/__init__.py": ""})
    write(folder / "project", {**CONF, "mine.py": MINE, "more.py": MORE})
    return folder / "project"


@pytest.fixture(scope="module")
def run(project):
    """Runs a command in the project, in a process; it must succeed or exit with `code`."""

    def ran(*typed, code=0, **more):
        env = {"PYTHONPATH": str(project.parent / "package")}
        done = distdl(*typed, cwd=project, env=env, **more)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return ran


@pytest.fixture
def there(said, project, monkeypatch):
    """Commands in this process, in the project, with the package importable, also by children."""
    package = str(project.parent / "package")
    monkeypatch.setenv("PYTHONPATH", package)
    monkeypatch.syspath_prepend(package)
    monkeypatch.chdir(project)
    yield said
    sys.modules.pop("more", None)


def test_it_trains_and_later_shells_find_it(run, project):
    folder = project / "outputs/default/x"
    typed = (
        f"trainer.devices={RANKS}",
        "trainer.max_epochs=1",
        "+callbacks.w._target_=mine.Witness",
    )
    output = run(*TINY, *LAUNCHER, *typed, "name=x", module=UNCHECKED)
    handle = f"background://{folder}/attempts/001"
    assert f"submitted  {handle}" in output
    output = run("jobs", "logs", "--follow", "outputs/default/x")
    code = folder / "attempts/001/bundle/code"
    assert f"ours: {code}/distdl/__init__.py mine: {code}/project/mine.py" in output
    assert len(losses(folder)) == 20 // RANKS
    assert not (code / "project/my_launchers").exists(), "the launcher itself does not travel"
    for verb in (("status", "outputs/default/x"), ("list",)):
        output = run("jobs", *verb)
        assert "SUCCEEDED" in output
        assert "background://" in output
    assert json.loads((folder / "attempts/001/job.json").read_text())["handle"] == handle


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_a_cancelled_job_has_saved_and_is_known_as_such(run, project):
    folder = project / "outputs/default/long"
    typed = (*TINY, *LAUNCHER, "trainer.devices=1", "trainer.max_epochs=99", "name=long")
    run(*typed, module=UNCHECKED)
    until(lambda: last_step(folder) >= 2, state=(folder / "attempts/001/job.log").read_text)
    assert "asked to end" in run("jobs", "cancel", "outputs/default/long")
    assert run("jobs", "wait", "outputs/default/long", code=75).startswith("PREEMPTED")
    assert list((folder / "checkpoints").glob("*.ckpt.manifest.json"))


def test_it_must_be_allowed_and_its_yaml_may_come_with_it(there, project, without_stage_2):
    shown = there("launcher=background", *CPU, "dry_run=true", code=2)
    assert "  launcher._target_: " in shown
    assert ALLOW in shown
    before = sorted(project.rglob("*"))
    shown = there("experiment=mine", *CPU, "dry_run=true")
    assert re.search(r"^nice -n 10 \S+ -m distdl.agent --devices 2 -- ", shown, re.MULTILINE)
    assert sorted(project.rglob("*")) == before
    theirs = project.parent / "their"
    write(theirs, {"launcher/theirs.yaml": CONF["conf/launcher/background.yaml"]})
    typed = ("--config-dir", str(theirs), "launcher=theirs", *CPU, "dry_run=true", ALLOW)
    assert "nice -n 10" in there(*typed)


@matrix_only
def test_where_nothing_queues_a_sweep_runs_in_turn(there, project, without_stage_2):
    there("-m", *CPU, *LAUNCHER, "launcher._target_=more.Alone", "seed=1,2", "name=turns")
    jobs = [*(project / "outputs/default/turns").glob("*/attempts/001")]
    times = [[(job / f"job.{n}").stat().st_mtime for n in ("pid", "exit")] for job in jobs]
    (_, first_end), (second_start, _) = sorted(times)
    assert first_end <= second_start


def test_what_its_platform_refuses_and_once_it_is_gone(there, project, without_stage_2):
    folder = project / "outputs/default"
    away, full = (f"launcher._target_=more.{name}" for name in ("Away", "Full"))
    unset = (*CPU, *LAUNCHER, "launcher.forward_env=[NOT_SET_ANYWHERE]", "name=unset")
    assert "$NOT_SET_ANYWHERE is not set: submitting" in there(*unset, "dry_run=true")
    assert "not set in this shell: NOT_SET_ANYWHERE" in there(*unset, full, code=2)
    shown = there(*CPU, *LAUNCHER, away, "name=gone", code=2)
    assert "nobody is there" in shown
    assert "is kept" not in shown
    assert not (folder / "unset").exists()
    assert not (folder / "gone").exists()
    shown = there(*CPU, *LAUNCHER, full, "name=gone", code=2)
    assert "the queue is full" in shown
    assert "outputs/default/gone is kept" in shown
    row = r"outputs/default/gone\t1\tFAILED\tmore, not submitted"
    assert re.search(row, there("jobs", "list"))
    (project / "more.py").unlink()
    sys.modules.pop("more")
    (folder / "gone/attempts/001/job.json").write_text('{"handle": "more://1"}')
    verb = ("jobs", "status", "outputs/default/gone")
    assert "more.Full is outside the allowed packages" in there(*verb)
    installed = "is more installed in this environment?"
    assert installed in there(*verb, "project.allow=[more]", code=2)
    assert "did you mean outputs/default/gone?" in there("jobs", "status", "gone", code=2)


def test_its_settings_are_checked(there):
    wrong = ("launcher.niceness=20", "trainer.num_nodes=2", "dry_run=true")
    shown = there(*CPU, *LAUNCHER, *wrong, code=2)
    assert "launcher.niceness: 20 is not 0 to 19 [out-of-range]\n" in shown
    assert "\n      launcher.niceness=10\n" in shown
    assert "this is one machine" in shown
