"""Where a project keeps its modules: found by validation, here, and in a job's copy of the project.

The far side is Python with nothing but a bundle, moved away, and the project gone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distdl.config import compose, own_code
from distdl.launch import external, planning, start
from distdl.runs import snapshot
from distdl.runs.directory import RunDirectory
from distdl.util.errors import UserError
from distdl.validation import validate
from tests.conftest import TINY, environment

FAR = """
import importlib, sys
from pathlib import Path
from omegaconf import OmegaConf
from distdl.config import own_code
from distdl.runs.bundle import Bundle
from distdl.validation.targets import Trust
bundle, target = Bundle(Path(sys.argv[1])), sys.argv[2]
mine = bundle.python_path(OmegaConf.load(bundle.path / "launch.yaml"))
own_code.make_importable(mine)
assert Trust(tuple(mine)).covers(target), mine
print(importlib.import_module(target.rpartition(".")[0]).__file__)
"""
MODULE = "class Net: ...\n"
# Files, the folder that the command is typed in, overrides, the class, its file.
LAYOUTS = {
    "src": (["src/pkg/__init__.py", "src/pkg/net.py"], ".", [], "pkg.net.Net", "src/pkg/net.py"),
    "src, typed in a subfolder": (
        ["src/pkg/__init__.py", "src/pkg/net.py", "configs/x.yaml"],
        *("configs", [], "pkg.net.Net", "src/pkg/net.py"),
    ),
    "a module in src": (["src/net.py"], ".", [], "net.Net", "src/net.py"),
    "src, a package itself": (
        ["src/__init__.py", "src/models/__init__.py", "src/models/net.py"],
        *(".", [], "src.models.net.Net", "src/models/net.py"),
    ),
    "namespace packages": (["ns/a/b/net.py"], ".", [], "ns.a.b.net.Net", "ns/a/b/net.py"),
    "namespace packages in src": (
        ["src/ns/a/b/net.py"],
        *(".", [], "ns.a.b.net.Net", "src/ns/a/b/net.py"),
    ),
    "a monorepo's folder, named": (
        ["team/vision/net.py", "team/sound/large.py"],
        *(".", ["project.root=team/vision"], "net.Net", "net.py"),
    ),
    "a monorepo's folder, typed in": (
        ["team/vision/src/pkg/__init__.py", "team/vision/src/pkg/net.py", "common/__init__.py"],
        *("team/vision", [], "pkg.net.Net", "team/vision/src/pkg/net.py"),
    ),
    "a monorepo's top, from below": (
        ["team/vision/x.py", "common/__init__.py", "common/net.py"],
        *("team/vision", [], "common.net.Net", "common/net.py"),
    ),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a git repository of these files, and goes to one of its folders."""

    def make(files: list[str], typed_in: str = ".") -> Path:
        top = tmp_path / "project"
        for file in ["pyproject.toml", *files]:
            (top / file).parent.mkdir(parents=True, exist_ok=True)
            (top / file).write_text(MODULE if file.endswith(".py") else "")
        subprocess.run(["git", "init", "-q"], cwd=top, check=True)
        monkeypatch.chdir(top / typed_in)
        return top

    monkeypatch.setattr(sys, "path", [*sys.path])
    return make


def sent(target: str, overrides: list[str], elsewhere: Path) -> Path:
    """The bundle of a job with this model, at another place."""
    tiny = [*TINY, "launcher=slurm", f"model._target_={target}", *overrides]
    config = compose.compose([*tiny, f"output_dir={elsewhere}/runs", "trainer.devices=1"])
    planned = planning.plan(config)
    attempt = start.create_attempt(planned, ["distdl"], start.snapshot_of(planned))
    shutil.copytree(attempt.path / "bundle", elsewhere / "bundle")
    return elsewhere / "bundle"


def found_far(bundle: Path, target: str) -> Path:
    """The file of a class in a bundle, relative to the copy of the project."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", FAR, str(bundle), target],
        env=environment(PYTHONPATH=str(bundle / "code")),
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).relative_to(bundle / "code" / "project")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_found_here_and_in_a_job(
    layout: str, project: Callable[..., Path], tmp_path: Path, without_stage_2: None
) -> None:
    files, typed_in, overrides, target, file = LAYOUTS[layout]
    top = project(files, typed_in)
    root = planning.root_of(compose.compose(overrides))
    own_code.make_importable(own_code.own_folders(root))
    code = f"import {target.rpartition('.')[0]} as m; print(m.__file__)"
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(own_code.own_folders(root))}
    shown = subprocess.run([sys.executable, "-P", "-c", code], env=here, capture_output=True)
    assert Path(shown.stdout.decode().strip()) == root / file, shown.stderr

    bundle = sent(target, overrides, tmp_path / "elsewhere")
    shutil.rmtree(top)
    assert found_far(bundle, target) == Path(file)
    assert not (bundle / "code/project/sound").exists()


def test_what_python_looks_at_anyway_below_the_root_is_found_in_a_job(
    project: Callable[..., Path],
    tmp_path: Path,
    without_stage_2: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a package in editable mode is found here, or by $PYTHONPATH; and what pip has copied into
    an environment inside the project is not the user's code."""
    top = project(
        ["python/pkg/__init__.py", "python/pkg/net.py", ".venv/lib/python3/site-packages/x.py"]
    )
    installed = top / ".venv/lib/python3/site-packages"
    sys.path += [str(top / "python"), str(installed), str(tmp_path), "relative"]
    assert own_code.own_folders(top) == (str(top), str(top / "python"))
    target = "pkg.net.Net"
    bundle = sent(target, [], tmp_path / "elsewhere")
    assert found_far(bundle, target) == Path("python/pkg/net.py")


def test_a_job_gets_the_metadata_of_the_projects_editable_packages_and_no_others(
    project: Callable[..., Path], tmp_path: Path
) -> None:
    top = project(["src/pkg/net.py"])
    for name, home in (("pkg", top), ("other", tmp_path / "other")):
        folder = tmp_path / f"site-packages/{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        url = {"url": home.as_uri(), "dir_info": {"editable": True}}
        (folder / "direct_url.json").write_text(json.dumps(url))
        (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n{folder.name}/RECORD,,\n")
    sys.path.append(str(tmp_path / "site-packages"))
    names = [name for _, name in snapshot.take(top, [], 300).files if name.endswith("METADATA")]
    assert names == ["project/pkg-1.0.dist-info/METADATA"]


def test_a_folder_outside_of_the_project_is_not_of_it(
    project: Callable[..., Path], tmp_path: Path
) -> None:
    top = project(["team/vision/net.py", "net_of_the_top.py"])
    said = validate.problems_of(
        compose.compose(["model._target_=net_of_the_top.Net", "project.root=team/vision"])
    )
    assert "is outside the allowed packages" in str(said[0])
    assert own_code.own_folders(top / "team/vision") == (str(top / "team/vision"),)
    assert own_code.python_path(top / "team/../team/vision") == ["."]


def test_a_runs_folder_is_nobodys_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create("seed: 1\n", {})
    (run.path / "attempts").mkdir(exist_ok=True)
    (run.path / "src").mkdir()
    monkeypatch.chdir(run.path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(run.path / "src")])
    assert own_code.own_folders(run.path) == () and own_code.python_path(run.path) == []


def test_distdl_itself_is_nobodys_own_code() -> None:
    from distdl.validation.targets import lies_in

    repository = Path(__file__).resolve().parents[2]
    assert not lies_in("distdl.runs.bundle.Bundle", [str(repository / "src")])
    assert lies_in("tests.conftest.distdl", [str(repository)])


def test_ranks_that_somebody_else_has_started_have_what_is_here(
    without_stage_2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose.compose([*TINY, "trainer.devices=1", "project.root=${oc.env:MINE}"])
    config.launcher = {"_target_": external.TARGET}
    monkeypatch.setenv("MINE", ".")
    planning.size_of(config)
    config.launcher._target_ = "distdl.launchers.slurm.SlurmLauncher"
    with pytest.raises(UserError, match="MINE, which the job will not have"):
        planning.size_of(config)
