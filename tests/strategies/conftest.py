"""Trainings that the tests of this folder share."""

from __future__ import annotations

import pytest

from tests.strategies.matrix import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("strategies"))
