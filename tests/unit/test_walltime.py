"""`launcher.walltime`: one meaning for all launchers."""

from __future__ import annotations

from typing import Any

import pytest

from distdl.launchers.azureml.launcher import AzureMLLauncher
from distdl.launchers.sagemaker import SageMakerLauncher
from distdl.launchers.slurm import SlurmLauncher
from distdl.util import walltime


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (12, 12 * 3600),
        (0.5, 1800),
        (90, 90 * 3600),
        ("90", 90 * 3600),
        (" 0.5 ", 1800),
        ("1:30:00", 5400),
        ("0:00:01", 1),
        ("120:00:01", 432001),
        ("2-12", 60 * 3600),
        ("1-00", 86400),
        ("1-00:30", 88200),
        ("1-00:00:30", 86430),
    ],
)
def test_what_is_a_time(given: Any, seconds: int) -> None:
    assert walltime.seconds(given) == seconds


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, "0 is no time at all"),
        ("0:00:00", "no time at all"),
        ("0-00", "no time at all"),
        (-1, "no time at all"),
        ("-1", "is not a time"),
        ("1:90:00", "minutes and seconds go from 00 to 59"),
        ("1:00:60", "minutes and seconds go from 00 to 59"),
        ("1:3:00", "minutes and seconds go from 00 to 59"),
        ("1-24", "hours go from 0 to 23"),
        ("1:30", "is minutes and seconds for Slurm, and hours and minutes for others"),
        (5400, "5400 would be 5400 hours; did YAML read 1:30:00"),
        ("", "'' is not a time"),
        ("1_0", "is not a time"),
        ("a day", "is not a time"),
        ("infinite", "is not a time"),
        (float("nan"), "nan is not a time"),
        (float("inf"), "inf is not a time"),
        (True, "True is not a time"),
        ([12], "is not a time"),
    ],
)
def test_what_is_none(given: Any, said: str) -> None:
    with pytest.raises(ValueError) as error:
        walltime.seconds(given)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "launcher", [SlurmLauncher, AzureMLLauncher, SageMakerLauncher], ids=lambda it: it.__name__
)
@pytest.mark.parametrize("given", ["2-12", "0:00:00", "90", "1:90:00", 5400, "1:30"])
def test_all_launchers_say_the_same(launcher: Any, given: Any) -> None:
    context = {"num_nodes": 1, "devices": 1, "accelerator": "cpu"}
    found = [p for p in launcher.check({"walltime": given}, context) if p.path == "walltime"]
    try:
        walltime.seconds(given)
        assert found == []
    except ValueError as error:
        assert [(p.what, p.remedy) for p in found] == [(str(error), walltime.FORMS)]
