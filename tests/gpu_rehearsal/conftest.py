"""The machine with simulated GPUs, and ranks on it that train case after case."""

import os

import pytest

from tests.gpu_rehearsal.machine import CannotBeCompiled, Machine
from tests.strategies.ranks import Ranks


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    """Skips where it cannot be compiled, and fails there in CI (`.ci/run`)."""
    try:
        return Machine(tmp_path_factory.mktemp("machine"))
    except CannotBeCompiled as error:
        if os.environ.get("DISTDL_NO_SKIP"):
            pytest.fail(f"the rehearsal cannot be compiled: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def ranks(machine, tmp_path_factory):
    """So many ranks, with a card each, started when they are first asked for."""
    started, folder = {}, tmp_path_factory.mktemp("ranks")

    def of(size):
        if size not in started:
            started[size] = Ranks(size, folder, "gpu", **machine.environment(size))
        return started[size]

    yield of
    for each in started.values():
        each.close()
