"""What the predictor refuses: by name, with the value, and what it should be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distdl.errors import UserError
from distdl.scaling import Link, Links, fit, predict, table
from tests.unit.test_scaling import GB, LINKS, a_setting


def problem(**changes: Any) -> str:
    with pytest.raises(UserError) as refused:
        a_setting(**changes)
    return str(refused.value)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"step_seconds": 0.0}, "step_seconds: must be more than 0"),
        ({"step_seconds": float("nan")}, "step_seconds"),
        ({"gradient_bytes": -1.0}, "gradient_bytes: must be 0 or more"),
        ({"backward_share": 1.5}, "is a share of the step"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"strategy": "fdsp"}, "did you mean fsdp?"),
        ({"strategy": "local_sgd"}, "local_sgd is not predicted"),
        ({"algorithm": "butterfly"}, "one of ring, hierarchical, tree, fastest"),
        ({"schedule": "1b1f"}, "schedule"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], says: str) -> None:
    assert says in problem(**changes)


def test_all_that_is_wrong_is_said_at_once() -> None:
    said = problem(step_seconds=-1.0, strategy="dpp", devices_per_node=0)
    assert all(name in said for name in ("step_seconds", "strategy", "devices_per_node"))


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"step_seconds": "0.1"}, "step_seconds: must be a number, more than 0, not '0.1'"),
        ({"step_seconds": True}, "step_seconds: must be a number, more than 0, not True"),
        ({"step_seconds": None}, "step_seconds: must be a number, more than 0, not None"),
        ({"gradient_bytes": "1"}, "gradient_bytes: must be a number, 0 or more, not '1'"),
        ({"gradient_bytes": 10**400}, "gradient_bytes: must be 0 or more, not 1000"),
        ({"weight_bytes": ""}, "weight_bytes: must be a number, 0 or more, not ''"),
        ({"backward_share": "1"}, "backward_share: must be a number, 0 or more, not '1'"),
        (
            {"devices_per_node": "8"},
            "devices_per_node: must be a whole number, more than 0, not '8'",
        ),
        ({"devices_per_node": 8.5}, "devices_per_node: must be a whole number, more than 0, not 8"),
        ({"devices_per_node": 0}, "devices_per_node: must be more than 0, not 0"),
        ({"stages": 2.5, "strategy": "pipeline"}, "stages: must be a whole number"),
        ({"links": None}, "links: must be Links, not None"),
        ({"links": Link(1.0)}, "links: must be Links, not Link(bandwidth=1.0, latency=0.0)"),
        ({"stages": np.ones(2)}, "stages: must be a whole number, more than 0, not array("),
        ({"strategy": 5}, "strategy: must be a name, not 5"),
        ({"schedule": None}, "schedule: must be a name, not None"),
    ],
)
def test_what_is_no_number_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    # Nothing else is said of it: no field is refused a second time for what it is used with.
    assert problem(**changes).startswith(says)
    assert len(problem(**changes).splitlines()) == 1 + ("name" in says or "Links" in says)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Link("1"), "Link.bandwidth: must be a number, more than 0, not '1'"),  # type: ignore[arg-type]
        (lambda: Link(0.0), "Link.bandwidth: must be more than 0, not 0.0"),
        (lambda: Link(-1), "Link.bandwidth: must be more than 0, not -1"),
        (lambda: Link(float("inf")), "Link.bandwidth: must be more than 0, not inf"),
        (lambda: Link(1e9, latency="a"), "Link.latency: must be a number, 0 or more, not 'a'"),  # type: ignore[arg-type]
        (lambda: Link(1e9, -1.0), "Link.latency: must be 0 or more, not -1.0"),
        (lambda: Links(1e9, Link(1e9)), "Links.inside: must be a Link, not 1000000000.0"),  # type: ignore[arg-type]
        (lambda: Links(Link(1e9), None), "Links.between: must be a Link, not None"),  # type: ignore[arg-type]
    ],
)
def test_a_link_refuses_by_itself(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(says)}"):
        make()


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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pieces_are_refused_where_the_schedule_has_none(schedule: str) -> None:
    staged: dict[str, Any] = {"strategy": "pipeline", "stages": 4, "schedule": schedule}
    said = problem(**staged, pieces_per_stage=2)
    assert (
        f"pieces_per_stage: 2 pieces need a schedule that interleaves them, and {schedule}" in said
    )
    assert "schedule='interleaved' or schedule='zero_bubble'" in said
    assert a_setting(**staged, pieces_per_stage=1) == a_setting(**staged)
    # With a misspelt schedule they may well be right.
    assert "pieces" not in problem(**staged | {"schedule": "interleaving"}, pieces_per_stage=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": 4},
        {"micro_batches": 8},
        {"schedule": "gpipe"},
        {"pieces_per_stage": 2},
        {"activation_bytes": 1e6},
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_zero3"])
def test_what_belongs_to_a_pipeline_is_refused_without_one(
    changes: dict[str, Any], strategy: str
) -> None:
    ((name, value),) = changes.items()
    said = problem(strategy=strategy, **changes)
    assert said.startswith(f"{name}: {value} belongs to a pipeline, and {strategy} has none")
    assert f"strategy='pipeline', or leave {name} out" in said
    # With a misspelt strategy it may well be right.
    assert "belongs" not in problem(strategy="pipelin", **changes)


def test_a_pipelines_defaults_may_be_given_to_all() -> None:
    defaults = {"stages": 1, "micro_batches": None, "schedule": "1f1b", "pieces_per_stage": 1}
    assert a_setting(**defaults, activation_bytes=0) == a_setting()


@pytest.mark.parametrize(
    "count, says",
    [
        ("8", "must be a whole number, at least 1, not '8'"),
        (2.5, "must be a whole number, at least 1, not 2.5"),
        (True, "must be a whole number, at least 1, not True"),
        (None, "must be a whole number, at least 1, not None"),
        (0, "must be at least 1, not 0"),
        (float("nan"), "must be at least 1, not nan"),
        pytest.param(10**400, "must be at least 1, not 1000", id="beyond any float"),
    ],
)
def test_a_number_of_devices_is_a_number(count: Any, says: str) -> None:
    with pytest.raises(UserError, match=f"^num_devices: {re.escape(says)}"):
        predict(a_setting(), count)
    assert table(a_setting(), [count])[0].missing.startswith(says)


@pytest.mark.parametrize("counts", [8, "64", None])
def test_a_table_is_of_several_numbers(counts: Any) -> None:
    with pytest.raises(UserError, match=f"^counts: must be several .*, not {counts!r}"):
        table(a_setting(), counts)


def test_numbers_of_devices_that_cannot_be() -> None:
    rows = {row.devices: row for row in table(a_setting(), [0, 1, 2, 3, 6, 8])}
    assert [n for n, row in rows.items() if row.prediction] == [1, 2, 3, 8]
    assert rows[6].missing == "6 devices do not fill nodes of 4"
    with pytest.raises(UserError, match="4 or 8"):
        predict(a_setting(), 6)
    staged = a_setting(strategy="pipeline", stages=4)
    assert "no pipelines of 4 stages" in table(staged, [2])[0].missing


@pytest.mark.parametrize(
    "points, says",
    [
        ({2: 0.1}, "one device is missing"),
        ({1: 0.1}, "several devices of one node are missing"),
        ({1: 0.1, 8: 0.2}, "2 to 4 devices in one node"),
        ({1: 0.1, 2: -0.2}, "2 devices: a step takes more than 0 s"),
        ({1: "a", 2: 0.1}, "measured: 1 devices: a step takes more than 0 s, not 'a'"),
        ({1: 0.1, "2": 0.1}, "measured: a number of devices must be a whole number, .*, not '2'"),
        ({0: 0.1, 1: 0.1, 2: 0.1}, "measured: a number of devices must be at least 1, not 0"),
        ([0.1, 0.2], "measured: must be seconds of a step by the number of devices, not "),
    ],
)
def test_too_little_is_refused(points: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        fit(a_setting(), points)
