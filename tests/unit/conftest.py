"""What the tests of `prepare` share."""

from __future__ import annotations

import pytest

from tests.miniature import SUBSET, imagenet, prepare


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """A small ImageNet as its tar files."""
    return imagenet(tmp_path_factory.mktemp("imagenet"))


@pytest.fixture(scope="module")
def prepared(tars, tmp_path_factory):
    """The same as shards."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    assert prepare("imagenet", tars, out, *SUBSET) == 0
    return out
