"""What choices by measurement are made in."""

from types import SimpleNamespace

import pytest

from distdl.job import Resources
from distdl.ranks.stopping import StopRequest
from distdl.runs.directory import RunDirectory
from distdl.worker.rank_context import RankContext


@pytest.fixture
def context(tmp_path):
    """Of rank 0 of one, in an attempt of a new run."""
    run = RunDirectory(tmp_path / "run")
    run.create("seed: 1\n", {})
    launch = {"run_id": "e/r", "where": {}, "changes": {}, "global_batch_size": None}
    attempt = run.begin_attempt(launch)
    names = ("rank", "local_rank", "world_size", "local_world_size")
    environment = SimpleNamespace(**dict(zip(names, (0, 0, 1, 1), strict=True)))
    size = Resources(1, 1, "cpu")
    return RankContext(attempt, attempt.launch(), size, environment, StopRequest())
