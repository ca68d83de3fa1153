"""tests/going_on.py: what was cut off goes on, and what has changed runs again."""

import os
import subprocess
import sys

from tests.conftest import ROOT
from tests.written import write

TESTS = """
import os, pytest
pytestmark = pytest.mark.xdist_group("one")
@pytest.mark.parametrize("address", ["a@b"])
def test_good(address): pass
def test_cut_off(): assert os.environ.get("WHOLE")
def test_not_here(): pytest.skip("no server")
"""


def test_what_has_passed_with_the_same_code_is_left_out_and_said(tmp_path):
    write(tmp_path, {"src/a.py": "", "tests/test_x.py": TESTS, "tests/test_y.py": TESTS})
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def counts(*words, **env):
        command = [sys.executable, "-m", "pytest", "-p", "tests.going_on", "--rootdir", ".", *words]
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **env}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout

    two = ("-n", "2", "--dist", "loadgroup")
    code, text = counts(*two)
    assert code == 1
    assert "2 failed, 2 passed, 2 skipped" in text
    code, text = counts(*two, WHOLE="1")
    assert code == 0
    assert "going on: 2 tests have passed with this code" in text
    assert "2 passed, 2 skipped" in text
    # A changed file of tests, and without processes of pytest-xdist.
    write(tmp_path, {"tests/test_y.py": TESTS + "# changed\n"})
    code, text = counts("-k", "not here", WHOLE="1")
    assert code == 0
    assert "2 passed" in text
    code, text = counts("-k", "not here", WHOLE="1")
    assert code == 0, "nothing is left to do"
    code, text = counts(*two, "-k", "not here", WHOLE="1")
    assert code == 0, "nothing is left to do"
    code, _ = counts(*two, "-k", "misspelt", WHOLE="1")
    assert code == 5, "there is no such test"
    # Anything of distdl.
    write(tmp_path, {"src/a.py": "changed = True\n"})
    code, text = counts(*two, WHOLE="1")
    assert "4 passed, 2 skipped" in text
    assert "going on: 0 tests" in text
