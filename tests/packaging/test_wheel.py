"""The wheel is complete: installed into a fresh environment, it does a dry run elsewhere."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment, matrix_only


def output(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(*folders: str) -> list[str]:
    """What git keeps, or would: what is not committed yet is tested as well."""
    names = output("git", "ls-files", "-co", "--exclude-standard", *folders).splitlines()
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A fresh environment with the wheel. The dependencies are this environment's own."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    venv = folder / "venv"
    python = sys.executable
    for name in files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    output(python, "-m", "build", "--wheel", "--no-isolation", "-o", folder, source, cwd=folder)
    output(python, "-m", "venv", "--without-pip", venv)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (python, "-m", "pip", "--python", venv / "bin/python", "install", "-q", "--no-deps")
    output(*pip, "--no-index", "--ignore-installed", next(folder.glob("*.whl")))
    return venv


def test_a_dry_run_from_another_folder(installed, tmp_path):
    typed = ("+experiment=resnet50_ddp", "debug=cpu", "dry_run=true")
    assert "resources  1 x 1 cpu" in output(installed / "bin/distdl", *typed, cwd=tmp_path)
    assert [*tmp_path.iterdir()] == []
    where = "import distdl, distdl.launchers.local as l; print(distdl.__file__, l.__file__)"
    assert output(installed / "bin/python", "-c", where, cwd=tmp_path).count(str(installed)) == 2


def test_every_module_option_and_template_is_in_the_wheel(installed):
    """A package missing from pyproject's list works editable and vanishes from the wheel."""
    wheel = zipfile.ZipFile(next(installed.parent.glob("*.whl")))
    sources = files("conf", "launchers", "src/distdl")
    expected = {"distdl/" + name.removeprefix("src/distdl/") for name in sources}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


@matrix_only
def test_a_new_project_trains_and_passes_its_tests(installed, tmp_path):
    distdl = installed / "bin/distdl"
    output(distdl, "new", "project", "x", cwd=tmp_path)
    assert "done " in output(
        distdl, "experiment=first", "trainer.accelerator=cpu", cwd=tmp_path / "x"
    )
    said = output(installed / "bin/python", "-m", "pytest", "-q", cwd=tmp_path / "x")
    assert "3 passed" in said
