"""Trainings that the tests of this folder share."""

import pytest

from tests.strategies.matrix import Runs


@pytest.fixture(scope="session")
def runs_of_all_files(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("strategies"))


@pytest.fixture(scope="module")
def runs(runs_of_all_files):
    yield runs_of_all_files
    runs_of_all_files.end_file()
