"""What the predictor refuses: by name, with the value and what it should be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distdl.scaling import Link, Links, fit, predict, table
from distdl.util.errors import Problem, UserError
from tests.unit.test_scaling import GB, LINKS, a_setting

STAGED: dict[str, Any] = {"strategy": "pipeline", "stages": 4}


def refused(make: Callable[[], Any]) -> dict[str, Problem]:
    with pytest.raises(UserError) as error:
        make()
    return {problem.path: problem for problem in error.value.problems}


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("step_seconds", 0.0, "greater than 0, not 0.0"),
        ("step_seconds", float("nan"), "finite number, not nan"),
        ("step_seconds", "0.1", "a number, not '0.1'"),
        ("step_seconds", True, "a number, not True"),
        ("gradient_bytes", -1.0, "greater than or equal to 0, not -1.0"),
        ("gradient_bytes", 10**400, "number, not 1000"),
        ("weight_bytes", "", "a number, not ''"),
        ("backward_share", 1.5, "less than or equal to 1, not 1.5"),
        ("devices_per_node", 8.5, "a valid integer"),
        ("devices_per_node", 0, "greater than or equal to 1, not 0"),
        ("micro_batches", 0, "greater than or equal to 1, not 0"),
        ("stages", np.ones(2), "a number, not array("),
        ("links", None, "instance of Links, not None"),
        ("links", Link(1.0), "instance of Links, not Link(bandwidth=1.0, latency=0.0)"),
        ("strategy", "local_sgd", "'deepspeed_zero3' or 'pipeline', not 'local_sgd'"),
        ("strategy", 5, "'deepspeed_zero3' or 'pipeline', not 5"),
        ("algorithm", "butterfly", "'ring', 'hierarchical', 'tree' or 'fastest', not 'butterfly'"),
        ("schedule", None, "not None"),
    ],
)
def test_a_value_is_refused_by_its_name_alone(name: str, value: Any, what: str) -> None:
    problems = refused(lambda: a_setting(**{name: value}))
    assert list(problems) == [name] and what in problems[name].what


def test_all_that_is_wrong_is_reported_at_once() -> None:
    problems = refused(lambda: a_setting(step_seconds=-1.0, strategy="fdsp", devices_per_node=0))
    assert list(problems) == ["step_seconds", "devices_per_node", "strategy"]
    assert problems["strategy"].remedy == "did you mean fsdp?"


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Link("1"), "bandwidth"),  # type: ignore[arg-type]
        (lambda: Link(0.0), "bandwidth"),
        (lambda: Link(float("inf")), "bandwidth"),
        (lambda: Link(1e9, -1.0), "latency"),
        (lambda: Links(1e9, Link(1e9)), "inside"),  # type: ignore[arg-type]
    ],
)
def test_a_link_refuses_by_itself(make: Callable[[], Any], path: str) -> None:
    assert list(refused(make)) == [path]


def test_numpys_numbers_and_whole_floats_are_numbers() -> None:
    plain = a_setting(strategy="pipeline", stages=4, micro_batches=8)
    other = a_setting(
        strategy="pipeline",
        stages=4.0,
        micro_batches=np.int8(8),
        devices_per_node=np.int64(4),
        step_seconds=np.float64(0.1),
        gradient_bytes=np.int64(100e6),
        links=Links(Link(np.float64(10 * GB), np.float64(1e-6)), LINKS.between),
    )
    assert predict(other, np.int64(16)) == predict(plain, 16) == predict(plain, 16.0)  # type: ignore[arg-type]
    points: Any = {np.int64(1): np.float64(0.1), 2.0: 0.12, 4: 0.12}
    assert fit(a_setting(), points) == fit(a_setting(), {1: 0.1, 2: 0.12, 4: 0.12})


def test_what_would_go_unused_is_refused() -> None:
    for schedule in ("gpipe", "1f1b"):
        setting = {**STAGED, "schedule": schedule}
        problem = refused(lambda: a_setting(**setting, pieces_per_stage=2))["pieces_per_stage"]  # noqa: B023
        assert problem.what.endswith(f"not {schedule}")
        assert problem.remedy == "schedule='interleaved' or schedule='zero_bubble'"
    given = {"stages": 4, "micro_batches": 8, "schedule": "gpipe", "pieces_per_stage": 2}
    given["activation_bytes"] = 1e6
    for strategy in ("ddp", "deepspeed_zero3"):
        problems = refused(lambda: a_setting(strategy=strategy, **given))  # noqa: B023
        assert problems.keys() == given.keys()
        assert problems["stages"].what == f"4 belongs to a pipeline, and {strategy} has none"
    # With a misspelt strategy or schedule they may be right.
    assert list(refused(lambda: a_setting(strategy="pipelin", **given))) == ["strategy"]
    wrong = {**STAGED, "schedule": "interleaving", "pieces_per_stage": 2}
    assert list(refused(lambda: a_setting(**wrong))) == ["schedule"]
    defaults = {"stages": 1, "micro_batches": None, "schedule": "1f1b", "pieces_per_stage": 1}
    assert a_setting(**defaults, activation_bytes=0) == a_setting()


@pytest.mark.parametrize("count", ["8", 2.5, True, None, 0, float("nan")])
def test_a_number_of_devices_is_a_number(count: Any) -> None:
    problem = refused(lambda: predict(a_setting(), count))["num_devices"]
    assert problem.what.endswith(f"not {count!r}")
    assert table(a_setting(), [count])[0].missing == problem.what


def test_numbers_of_devices_that_cannot_be() -> None:
    rows = {row.devices: row for row in table(a_setting(), [0, 1, 2, 3, 6, 8])}
    assert [n for n, row in rows.items() if row.prediction] == [1, 2, 3, 8]
    assert rows[6].missing == "6 devices do not fill nodes of 4"
    assert refused(lambda: predict(a_setting(), 6))["num_devices"].remedy == "4 or 8"
    assert "into pipelines of 4 stages" in table(a_setting(**STAGED), [2])[0].missing


@pytest.mark.parametrize(
    ("points", "what"),
    [
        ({2: 0.1}, "measured: one device is missing"),
        ({1: 0.1}, "measured: several devices of one node are missing"),
        ({1: 0.1, 8: 0.2}, "2 to 4 devices in one node"),
        ({1: 0.1, 2: -0.2}, "measured.2: must be greater than 0"),
        ({1: 0.1, "2": 0.1}, "measured.2: must be a number, not '2'"),
        ({0: 0.1, 1: 0.1, 2: 0.1}, "measured.0: must be greater than or equal to 1"),
        ([0.1, 0.2], "measured: must be a valid dictionary"),
    ],
)
def test_too_little_is_refused(points: Any, what: str) -> None:
    with pytest.raises(UserError, match=re.escape(what)):
        fit(a_setting(), points)
