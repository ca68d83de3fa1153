"""A rank that runs a program: what keeps it from running."""

from __future__ import annotations

import logging

import pytest
from omegaconf import OmegaConf

from distdl.job import Resources
from distdl.program import running
from distdl.program.folder import NotKept
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import StopRequest
from distdl.runs.directory import RunDirectory
from distdl.util.errors import NotRun
from distdl.worker.failing import record_failure


@pytest.fixture
def attempt(tmp_path):
    run = RunDirectory(tmp_path / "outputs/e/r")
    run.create("seed: 1\n", {"command": ["python"]})
    size = {"num_nodes": 1, "devices": 1, "accelerator": "cpu", "device_ids": None}
    return run.begin_attempt({"run_id": "e/r", "where": {}, "resources": size})


def ran(attempt, **section):
    config = OmegaConf.create({"program": {"command": ["true"], **section}})
    place = Environment("single", 0, 1, 0, 1)
    size = Resources(accelerator="cpu")
    rank = running.ProgramRank(
        attempt, place, size, StopRequest(), attempt.launch(), attempt.path, ()
    )
    running.run(config, rank)


def test_what_the_system_refuses_is_one_line(attempt, caplog):
    """Here the name of the log is a folder's. The traceback is in the rank's log."""
    (attempt.logs / "rank_0.log").mkdir(parents=True)
    with pytest.raises(NotRun, match="Is a directory") as refused:
        ran(attempt)
    with caplog.at_level(logging.DEBUG, "distdl"):
        assert record_failure(attempt, 0, refused.value) == 1
    shown = [each.getMessage() for each in caplog.records if each.levelno >= logging.INFO]
    assert shown == [str(refused.value)]
    assert "Traceback" in caplog.text


def test_a_folder_of_checkpoints_that_cannot_be_made_is_named(attempt):
    with pytest.raises(NotKept, match="/proc/none cannot be made, for the checkpoints"):
        ran(attempt, checkpoints="/proc/none")
