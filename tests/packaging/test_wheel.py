"""The wheel holds everything: installed into a fresh environment, it does a dry run elsewhere."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment


def test_every_package_is_listed() -> None:
    """A subpackage missing from the list works editable and vanishes from the wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"distdl.conf"}
    for base, prefix in ((ROOT / "src/distdl", "distdl"), (ROOT / "launchers", "distdl.launchers")):
        for path in base.rglob("__init__.py"):
            found.add(".".join([prefix, *path.parent.relative_to(base).parts]))
    assert set(listed) == found


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A fresh environment with the wheel. The dependencies are this environment's own."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    for changed in _working_tree():  # what is not committed yet is tested as well
        target = source / changed
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / changed).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder)]
    subprocess.run([*build, str(source)], check=True, capture_output=True, cwd=folder)
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel = next(folder.glob("*.whl"))
    python = venv / "bin/python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    command += ["--no-index", "--ignore-installed", str(wheel)]
    subprocess.run(command, check=True, env=environment())
    return venv


def _working_tree() -> list[str]:
    listed = ["git", "-C", str(ROOT), "ls-files", "-m", "-o", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def test_a_dry_run_from_another_folder(installed, tmp_path) -> None:
    done = subprocess.run(
        [installed / "bin/distdl", "+experiment=resnet50_ddp", "debug=cpu", "dry_run=true"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "resources  1 x 1 cpu" in done.stdout
    assert list(tmp_path.iterdir()) == []
    where = "import distdl, distdl.launchers.local as l; print(distdl.__file__, l.__file__)"
    python = [installed / "bin/python", "-c", where]
    shown = subprocess.run(python, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert shown.stdout.count(str(installed)) == 2, shown


def test_every_option_and_template_is_in_the_wheel(installed) -> None:
    wheel = next(installed.parent.glob("*.whl"))
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    names = {n for n in names if not n.endswith((".py", "py.typed"))}
    listed = ["git", "-C", str(ROOT), "ls-files", "-c", "-o", "--exclude-standard"]
    where = ("conf", "launchers", "src/distdl")
    files = subprocess.run([*listed, *where], check=True, capture_output=True)
    found = files.stdout.decode().replace("src/distdl/", "").split()
    expected = {f"distdl/{n}" for n in found if not n.endswith((".py", "py.typed"))}
    assert names == expected
