"""Parts of sentences in messages."""

import pytest

from distdl.util.wording import first_few, plural


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "classes"), (1, "class"), (1.5, "classes"), (2, "classes")]
)
def test_plural(count, expected):
    assert plural("class", count) == expected
    assert plural("core", 2) == "cores"


def test_a_list_that_is_cut_says_so():
    assert first_few(["a", "b", "c"]) == "a, b, c"
    assert first_few(["a", "b", "c", "d"]) == "a, b, c, ..."
