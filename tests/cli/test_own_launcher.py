"""A launcher in a package of somebody else: docs/own_launcher.md, word for word."""

from __future__ import annotations

import json
import re
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, UNCHECKED, distdl, last_step, losses, status

PAGE = ROOT / "docs/own_launcher.md"
FENCE = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = dict(FENCE.findall(PAGE.read_text()))
ALLOW = "project.allow=[my_launchers]"
# A class of the user's own project, which must be in the bundle; it says whose code it runs with.
MINE = """
import distdl
from lightning.pytorch import Callback

class Witness(Callback):
    def on_train_start(self, trainer, module):
        print("ours:", distdl.__file__, "mine:", __file__, flush=True)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's package, in a folder that an editable install would put on Python's path."""
    folder = tmp_path_factory.mktemp("package")
    write(folder, {k: v for k, v in FILES.items() if not k.startswith("conf/")})
    (folder / "my_launchers/__init__.py").touch()
    return folder


@pytest.fixture(scope="module")
def env(package: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(package)}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Somebody's project, with the page's options in its ./conf."""
    folder = tmp_path_factory.mktemp("project")
    write(folder, {k: v for k, v in FILES.items() if k.startswith("conf/")})
    (folder / "mine.py").write_text(MINE)
    return folder


def write(folder: Path, files: dict[str, str]) -> None:
    assert files
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def run(project: Path, env: dict[str, str]) -> Path:
    """Submitted and left; the command returns at once."""
    said = distdl(
        *TINY,
        "launcher=background",
        ALLOW,
        "trainer.devices=2",
        "trainer.max_epochs=1",
        "+callbacks.witness._target_=mine.Witness",
        "follow=false",
        "name=x",
        cwd=project,
        env=env,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    found = project / "outputs/default/x"
    assert f"submitted  background://{found}/attempts/001" in said.stdout
    return found


def test_it_trains_and_later_shells_find_it(run, project, env) -> None:
    followed = distdl("jobs", "logs", "--follow", "outputs/default/x", cwd=project, env=env)
    assert followed.returncode == 0, followed.stdout + followed.stderr
    code = run / "attempts/001/bundle/code"
    assert f"ours: {code}/distdl/__init__.py mine: {code}/project/mine.py" in followed.stdout
    assert len(losses(run)) == 10
    assert status(run)["state"] == "SUCCEEDED"
    assert not (code / "project/my_launchers").exists(), "the launcher itself does not travel"

    said = distdl("jobs", "status", "outputs/default/x", cwd=project, env=env)
    assert "state   SUCCEEDED" in said.stdout and "background://" in said.stdout
    said = distdl("jobs", "list", cwd=project, env=env)
    assert "SUCCEEDED" in said.stdout and "background://" in said.stdout
    record = json.loads((run / "attempts/001/job.json").read_text())
    assert record["handle"] == f"background://{run}/attempts/001"


def test_a_cancelled_job_has_saved_and_is_known_as_such(project, env) -> None:
    given = (*TINY, "launcher=background", ALLOW, "trainer.devices=1", "trainer.max_epochs=99")
    given += ("follow=false", "name=long")
    said = distdl(*given, cwd=project, env=env, module=UNCHECKED)
    assert said.returncode == 0, said.stdout + said.stderr
    run = project / "outputs/default/long"
    deadline = time.monotonic() + 120
    while last_step(run) < 2:
        assert time.monotonic() < deadline, (run / "attempts/001/job.log").read_text()
        time.sleep(0.1)
    said = distdl("jobs", "cancel", "outputs/default/long", cwd=project, env=env)
    assert "asked to end" in said.stdout
    waited = distdl("jobs", "wait", "outputs/default/long", cwd=project, env=env)
    assert waited.returncode == 75 and waited.stdout.startswith("PREEMPTED"), waited
    assert list((run / "checkpoints").glob("*.ckpt.manifest.json"))


PLACES = """
from distdl.util.errors import Problem, UserError
from my_launchers.background import BackgroundLauncher

class Away(BackgroundLauncher):
    def reach(self, request):
        raise UserError(Problem("launcher", "nobody is there"))

class Full(BackgroundLauncher):
    def submit(self, request):
        raise UserError(Problem("launcher", "the queue is full"))
"""


@pytest.fixture
def here(project, package, monkeypatch) -> Path:
    """This process in the project's folder, with the package importable, in its children too."""
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.chdir(project)
    return project


CPU = ("debug=cpu", "trainer.devices=2", "dry_run=true")


def test_where_nothing_queues_a_sweep_goes_in_turn(project, env) -> None:
    (project / "alone.py").write_text(
        "from my_launchers.background import BackgroundLauncher\n\n\n"
        "class Alone(BackgroundLauncher):\n    in_turn = True\n"
    )
    given = ("launcher=background", "launcher._target_=alone.Alone", ALLOW, "trainer.devices=1")
    short = ("trainer.max_epochs=1", "data.train_samples=8", "seed=1,2", "name=turns")
    given = ("-m", *TINY, *given, *short, "follow=false")
    done = distdl(*given, cwd=project, env=env, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = sorted(
        (status(run) for run in (project / "outputs/default/turns").iterdir()),
        key=lambda found: found["started"],
    )
    assert first["state"] == second["state"] == "SUCCEEDED"
    assert second["started"] >= first["ended"]


def test_it_must_be_allowed(command, without_stage_2, here) -> None:
    said = command("launcher=background", *CPU)
    assert said.code == 2
    assert "my_launchers.background.BackgroundLauncher is outside the allowed packages" in said.err
    assert f"if you trust it: {ALLOW}" in said.err
    before = sorted(here.rglob("*"))
    said = command("experiment=mine", *CPU)
    assert said.code == 0, said
    assert re.search(r"^nice -n 10 \S+ -m distdl.agent --devices 2 -- ", said.out, re.MULTILINE)
    assert sorted(here.rglob("*")) == before


def test_its_settings_are_checked(command, here) -> None:
    said = command(
        "launcher=background", *CPU, ALLOW, "launcher.niceness=20", "trainer.num_nodes=2"
    )
    assert said.code == 2
    assert "launcher.niceness: 20 is not 0 to 19\n      launcher.niceness=10" in said.err
    assert "this is one machine" in said.err


def test_what_its_place_refuses(command, without_stage_2, here) -> None:
    (here / "places.py").write_text(PLACES)
    given = (*CPU[:2], "launcher=background", ALLOW, "name=refused")
    said = command("launcher._target_=places.Away", *given)
    assert said.code == 2 and "nobody is there" in said.err and "is kept" not in said.err
    assert not (here / "outputs/default/refused").exists()

    said = command("launcher._target_=places.Full", *given)
    assert said.code == 2 and "the queue is full" in said.err
    assert "outputs/default/refused is kept" in said.err
    listed = command("jobs", "list").out
    assert re.search(r"outputs/default/refused\t1\tFAILED\tplaces, not submitted", listed), listed
    said = command("jobs", "status", "outputs/default/refused")
    assert "job     places, not submitted" in said.out

    secret = "launcher.forward_env=[NOT_SET_ANYWHERE]"
    said = command("launcher=background", *CPU, ALLOW, secret)
    assert said.code == 0 and "$NOT_SET_ANYWHERE is not set here" in said.out
    said = command("launcher._target_=places.Full", *given[:-1], "name=unset", secret)
    assert said.code == 2 and "not set in this shell: NOT_SET_ANYWHERE" in said.err
    assert not (here / "outputs/default/unset").exists()

    (here / "places.py").unlink()  # a package that is not installed here
    sys.modules.pop("places")
    job = here / "outputs/default/refused/attempts/001/job.json"
    job.write_text('{"handle": "places://1"}')
    said = command("jobs", "status", "outputs/default/refused")
    assert "places.Full is outside the allowed packages" in said.out
    said = command("jobs", "status", "outputs/default/refused", "project.allow=[places]")
    assert said.code == 2 and "is places installed in this environment?" in said.err
    said = command("jobs", "status", "refused")
    assert said.code == 2 and "did you mean outputs/default/refused?" in said.err


def test_the_yaml_may_come_with_the_package(command, without_stage_2, here, tmp_path) -> None:
    write(tmp_path / "their", {"launcher/theirs.yaml": FILES["conf/launcher/background.yaml"]})
    said = command("--config-dir", str(tmp_path / "their"), "launcher=theirs", *CPU, ALLOW)
    assert said.code == 0, said
    assert "nice -n 10" in said.out


def test_the_packages_metadata(package) -> None:
    metadata = tomllib.loads((package / "pyproject.toml").read_text())
    assert metadata["tool"]["setuptools"]["packages"] == ["my_launchers"]
    assert metadata["project"]["name"] == "my-launchers"
