"""Where a project keeps its modules: found by validation, here, and in a job's copy of the project.

The far side is Python with nothing but a bundle, moved away, and the project gone.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distdl.config import compose, own_code
from distdl.launch import launch, planning, submitting
from distdl.runs.directory import RunDirectory
from distdl.validation import validate
from distdl.validation.targets import lies_in
from tests.conftest import ROOT, TINY, environment
from tests.written import write

HERE = """
import importlib, sys
print(importlib.import_module(sys.argv[1].rpartition(".")[0]).__file__)
"""
FAR = f"""
import sys
from pathlib import Path
from omegaconf import OmegaConf
from distdl.config import own_code
from distdl.runs.bundle import Bundle
from distdl.validation.targets import Trust
bundle = Bundle(Path(sys.argv[2]))
mine = bundle.python_path(OmegaConf.load(bundle.path / "launch.yaml"))
own_code.make_importable(mine)
assert Trust(tuple(mine)).covers(sys.argv[1]), mine
{HERE}"""
# Files, the folder that the command is typed in, overrides, the class, its file below the root.
LAYOUTS = {
    "src, a package": ("src/__init__.py src/net.py", ".", [], "src.net.Net", "src/net.py"),
    "namespaces in src": ("src/ns/a/net.py b/x", "b", [], "ns.a.net.Net", "src/ns/a/net.py"),
    "a folder, named": ("a/net.py sound/x.py", ".", ["project.root=a"], "net.Net", "net.py"),
    "a folder, typed in": ("a/src/pkg/net.py", "a", [], "pkg.net.Net", "a/src/pkg/net.py"),
    "the top, from below": ("a/x.py top/net.py", "a", [], "top.net.Net", "top/net.py"),
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Makes a git repository of these files, and goes to one of its folders."""

    def make(files, typed_in="."):
        top = tmp_path / "project"
        for file in ("pyproject.toml", *files.split()):
            (top / file).parent.mkdir(parents=True, exist_ok=True)
            (top / file).write_text("class Net: ...\n" if file.endswith(".py") else "")
        subprocess.run(["git", "init", "-q"], cwd=top, check=True)
        monkeypatch.chdir(top / typed_in)
        return top

    monkeypatch.setattr(sys, "path", [*sys.path])
    return make


def file_of(code, path, *arguments):
    """What Python prints that has nothing but this $PYTHONPATH."""
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    env = environment(PYTHONPATH=str(path))
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def sent(target, overrides, elsewhere):
    """The code in the bundle of a job with this model, elsewhere; the file of the model there."""
    tiny = [*TINY, "launcher=slurm", f"model._target_={target}", *overrides]
    config = compose.compose([*tiny, f"output_dir={elsewhere}/runs", "trainer.devices=1"])
    plan = planning.plan(config)
    attempt = submitting.create_attempt(plan, ["distdl"], submitting.snapshot_of(plan))
    bundle = Path(shutil.copytree(attempt.path / "bundle", elsewhere / "bundle"))
    shutil.rmtree(elsewhere.parent / "project")
    code = bundle / "code"
    return code / "project", file_of(FAR, code, target, bundle).relative_to(code / "project")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_found_here_and_in_a_job(layout, project, tmp_path, without_stage_2):
    files, typed_in, overrides, target, file = LAYOUTS[layout]
    project(files, typed_in)
    root = launch.root_of(compose.compose(overrides))
    folders = own_code.own_folders(root)
    own_code.make_importable(folders)
    assert file_of(HERE, os.pathsep.join(folders), target) == root / file
    code, found = sent(target, overrides, tmp_path / "elsewhere")
    assert found == Path(file)
    assert not (code / "sound").exists()


def test_what_python_looks_at_anyway_is_found_in_a_job(project, tmp_path, without_stage_2):
    """As a package in editable mode is found here, or by $PYTHONPATH. What pip has copied into an
    environment inside the project is not the user's code, nor is an editable package elsewhere."""
    installed = ".venv/lib/python3/site-packages"
    top = project(f"python/pkg/__init__.py python/pkg/net.py {installed}/x.py")
    for name, home in (("pkg", top), ("other", tmp_path / "other")):
        folder = f"{name}-1.dist-info"
        url = {"url": home.as_uri(), "dir_info": {"editable": True}}
        files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
            "direct_url.json": json.dumps(url),
            "RECORD": f"{folder}/METADATA,,\n",
        }
        write(tmp_path / folder, files)
    sys.path += [str(top / "python"), str(top / installed), str(tmp_path), "relative"]
    assert own_code.own_folders(top) == (str(top), str(top / "python"))
    code, found = sent("pkg.net.Net", [], tmp_path / "elsewhere")
    assert found == Path("python/pkg/net.py")
    assert [path.name for path in code.glob("*.dist-info")] == ["pkg-1.dist-info"]


def test_other_folders_runs_and_distdl_itself_are_not_the_users_code(project, monkeypatch):
    top = project("team/vision/net.py net_of_the_top.py")
    overrides = ["model._target_=net_of_the_top.Net", "project.root=team/vision"]
    problem = validate.problems_of(compose.compose(overrides))[0]
    assert "there is no module 'net_of_the_top'" in str(problem)
    assert str(top / "team/vision") in str(problem), "where it was looked for"
    assert own_code.own_folders(top / "team/vision") == (str(top / "team/vision"),)
    run = RunDirectory(top / "run")
    run.create("seed: 1\n", {})
    for folder in ("attempts", "src"):
        (run.path / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(run.path)
    sys.path.append(str(run.path / "src"))
    assert own_code.own_folders(run.path) == ()
    assert own_code.python_path(run.path, ()) == []
    assert not lies_in("distdl.runs.bundle.Bundle", [str(ROOT / "src")])
    assert lies_in("tests.conftest.distdl", [str(ROOT)])
