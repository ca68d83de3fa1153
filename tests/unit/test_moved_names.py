"""Old names keep working: in the `_target_` of a run of any age, and in users' own imports."""

import importlib
import re
import subprocess
import sys

import pytest

from distdl import moved_names
from distdl.moved_names import MOVED
from distdl.validation.kinds import locate
from tests.conftest import ROOT

ONCE = """
import distdl.errors, distdl.util.errors
import distdl.scaling.fit as old
import distdl.tools.scaling.fit as new
from distdl.errors import UserError
from distdl.health.incident import write
assert distdl.errors is distdl.util.errors and old is new
assert distdl.errors.__name__ == "distdl.util.errors"
"""


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_same_object(old):
    assert locate(old) is locate(MOVED[old])


def test_an_import_by_an_old_name_loads_nothing_twice():
    subprocess.run([sys.executable, "-c", ONCE], check=True)


def test_an_old_name_can_be_run():
    done = subprocess.run([sys.executable, "-m", "distdl.worker.agent"], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_name_that_never_was_stays_unknown():
    for name in ("distdl.serving.nothing", "distdl.nothing"):
        with pytest.raises(ModuleNotFoundError, match="nothing"):
            importlib.import_module(name)
    assert moved_names.current("distdl.servings") == "distdl.servings"


def test_the_table_names_what_exists_and_hides_nothing():
    for old, new in MOVED.items():
        assert moved_names.current(new) == new, f"{new} has moved on: {old} must name where to"
        path = ROOT / "src" / old.replace(".", "/")
        assert not path.with_suffix(".py").exists(), f"{old} exists, and can no longer be imported"


def test_imports_in_documents_name_what_exists():
    """Those of users' own code, in the blocks of the documents."""
    found = set()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = path.read_text(encoding="utf-8")
        for module, names in re.findall(r"^from (distdl\.[\w.]+) import ([\w, ]+)$", text, re.M):
            found |= {f"{module}.{name.strip()}" for name in names.split(",")}
    assert len(found) >= 5
    for name in sorted(found):
        locate(name)
