"""The Makefile says what is wrong before anything runs for hours, and finishes what was cut off."""

import os
import shutil
import subprocess

import pytest

from tests.conftest import ROOT
from tests.written import write

# Without the variables of a make that has started the tests.
PLAIN = {"PATH": os.environ["PATH"]}
FILES = dict.fromkeys(("tests/here.py", "pyproject.toml", "constraints.txt"), "")


def make(folder, *words):
    """What make would do in a folder with these files."""
    shutil.copy(ROOT / "Makefile", folder)
    command = ["make", "-n", *words]
    return subprocess.run(command, cwd=folder, env=PLAIN, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench parts=startup", "parts: no setting of `make bench`, which has: PYTHON VENV "),
        ("test MATRIX=tests/here.py", "MATRIX: no setting of `make test`, which has: PYTHON VENV "),
        ("matrix tests/here.py", "tests/here.py: make runs no single file. A test: .venv/bin/py"),
        ("bench startup", 'bench: write it alone; PARTS="startup search" chooses parts'),
        ("bench PARTS=", "PARTS is empty: name parts, or leave it away for all of them"),
        (
            "matrix ALONE=tests/here.py MATRIX=tests/gone.py",
            "matrix: no such test: tests/gone.py.",
        ),
        ("matrix ALONE=", "matrix: without ALONE or MATRIX all tests would run; a part of it: "),
        ("matrix ALONE=tests/gone.py::test_one", "matrix: no such test: tests/gone.py::test_one "),
    ],
)
def test_what_would_do_something_else_for_hours_is_refused(words, said, tmp_path):
    write(tmp_path, FILES)
    done = make(tmp_path, *words.split())
    assert said in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


def test_parts_and_files_that_can_run(tmp_path):
    write(tmp_path, FILES)
    assert "benchmarks.run --keep a b" in make(tmp_path, "bench", "PARTS=a b").stdout
    words = ("ALONE=tests/here.py", "MATRIX=tests tests/here.py::test_one")
    assert "tests tests/here.py::test_one;" in make(tmp_path, "matrix", *words).stdout


@pytest.mark.parametrize("target", [".servers/jax", ".servers/loaders", "servers-kube"])
def test_an_environment_that_was_cut_off_is_made_anew(target, tmp_path):
    name = {"servers-kube": ".servers/kube"}.get(target, target)
    write(tmp_path, {**FILES, f"{name}/bin/python": "", ".venv/.ready": ""})
    made = make(tmp_path, target).stdout
    assert f"rm -rf {name}" in made
    assert f"touch {name}/.ready" in made
    write(tmp_path, {".venv/.ready": "", f"{name}/.ready": ""})
    again = make(tmp_path, target)
    assert again.returncode == 0
    assert f"rm -rf {name}" not in again.stdout


def test_help_names_every_target_with_a_text(tmp_path):
    done = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, env=PLAIN)
    assert done.returncode == 0
    for target in ("train", "test", "matrix", "bench", "servers-kube"):
        assert f"\n{target}: " in done.stdout
