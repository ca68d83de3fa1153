"""A warm process for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adoption.warm import Warm


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    made = Warm(tmp_path_factory.mktemp("warm") / "log.txt")
    yield made
    made.close()
