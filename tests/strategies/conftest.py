"""Process groups that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.strategies.matrix import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("strategies"))
    yield made
    made.close()
