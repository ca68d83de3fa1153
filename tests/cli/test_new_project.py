"""`new project`: a project of each task trains and passes its own tests as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from distdl.cli.new import TASKS as OFFERED
from distdl.cli.schemas import of_command
from distdl.tools.project import make
from tests.conftest import distdl, environment, matrix_only


@pytest.fixture
def without_schemas(monkeypatch):
    """Schemas need a child process that imports torch: tests/cli/test_schema.py has one."""
    monkeypatch.setattr(make.schemas, "read", lambda: None)
    monkeypatch.setattr(make.vscode, "write", lambda found, folder: None)


@pytest.mark.parametrize("task", make.TASKS)
def test_each_file_is_what_its_name_says(task):
    written = make.content("my-project", "my_project", task)
    for path, data in written.items():
        if path.endswith(".py"):
            compile(data, path, "exec")
        elif path.endswith(".yaml"):
            yaml.safe_load(data)
        elif path.endswith(".json"):
            json.loads(data)
        assert b"{{" not in data.replace(b"${{", b"")
    launched = json.loads(written[".vscode/launch.json"])["configurations"]
    assert [each["module"] for each in launched] == ["distdl", "distdl", "pytest"]
    assert OFFERED == make.TASKS


def test_the_command(command, tmp_path, without_schemas):
    said = command("new", "project", "my-project", "--task", "classify")
    assert said.code == 0, said
    assert "cd my-project && distdl experiment=first && pytest" in said.out
    assert (tmp_path / "my-project/my_project/network.py").is_file()
    assert len([*(tmp_path / "my-project/data/shapes/train/disc").iterdir()]) == 16
    assert [each.name for each in tmp_path.iterdir()] == ["my-project"]


def test_a_program_is_told_what_was_written(command, without_schemas):
    said = command("new", "project", "mine", "--json")
    last = json.loads(said.out)
    Draft202012Validator(of_command("new project")).validate(last)
    assert "conf/experiment/first.yaml" in last["answer"]["files"]


def test_nothing_is_overwritten(command, tmp_path, without_schemas):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("mine", "link"):
        said = command("new", "project", name)
        assert said.code == 2
        assert "nothing is overwritten [exists-already]" in said.err
    assert (tmp_path / "mine/notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert command("new", "project", "empty").code == 0
    assert (tmp_path / "empty/conf/experiment/first.yaml").is_file()


@pytest.mark.parametrize("name", ["torch", "import", "json", "2fast", "a b", "tests", "distdl"])
def test_names_that_no_package_can_have(name, command, tmp_path):
    said = command("new", "project", name)
    assert said.code == 2
    assert f"{name}: " in said.err
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_not_there(command):
    assert "there is no folder" in command("new", "project", "nowhere/mine").err


def run(*words: str, cwd: Path) -> str:
    env = environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@matrix_only
@pytest.mark.parametrize("task", make.TASKS)
def test_a_project_trains_and_passes_its_tests(task, tmp_path):
    made = distdl("new", "project", "x", "--task", task, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "note:" not in made.stderr, "each class is read"
    schemas = json.loads((tmp_path / "x/.vscode/settings.json").read_text())["yaml.schemas"]
    assert "conf/model/*.yaml" in schemas["./.vscode/schemas/model.json"]
    said = run("distdl", "experiment=first", "trainer.accelerator=cpu", cwd=tmp_path / "x")
    assert "done " in said
    said = run("pytest", "-q", cwd=tmp_path / "x")
    assert "3 passed" in said
