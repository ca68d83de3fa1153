"""Trainings that the tests of this folder share."""

import pytest

from tests.strategies.matrix import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("strategies"))
