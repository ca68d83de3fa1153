"""Parts of sentences in messages."""

import re

import pytest

from distdl.util.wording import first_few, plural
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "classes"), (1, "class"), (1.5, "classes"), (2, "classes")]
)
def test_plural(count, expected):
    assert plural("class", count) == expected
    assert plural("core", 2) == "cores"


def test_a_list_that_is_cut_says_so():
    assert first_few(["a", "b", "c"]) == "a, b, c"
    assert first_few(["a", "b", "c", "d"]) == "a, b, c, ..."


def test_what_is_to_be_filled_in_can_stand_in_a_shell():
    """It is in capitals: `=<name>` would read a file."""
    files = [path for folder in ("src", "launchers") for path in (ROOT / folder).rglob("*.py")]
    found = [path for path in files if re.search("=<[a-z]", path.read_text(encoding="utf-8"))]
    assert found == []
