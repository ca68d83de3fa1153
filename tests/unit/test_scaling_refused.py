"""What the predictor refuses: by name, with the value and what it should be."""

import numpy as np
import pytest

from distdl.scaling import Link, Links, fit, predict, table
from distdl.util.errors import UserError
from tests.unit.test_scaling import BETWEEN, GB, a_setting

NAN, STAGED = float("nan"), {"strategy": "pipeline", "stages": 4}
PIECES = {"stages": 4, "micro_batches": 8, "schedule": "gpipe", "pieces_per_stage": 2}
PIECES |= {"activation_bytes": 1e6}


def refused(make, *arguments, **settings):
    with pytest.raises(UserError) as error:
        make(*arguments, **settings)
    return {problem.path: problem for problem in error.value.problems}


VALUES = [
    ("step_seconds", 0.0, "greater than 0, not 0.0"),
    ("step_seconds", NAN, "finite number, not nan"),
    ("step_seconds", "0.1", "a number, not '0.1'"),
    ("step_seconds", True, "a number, not True"),
    ("gradient_bytes", -1.0, "greater than or equal to 0, not -1.0"),
    ("gradient_bytes", 10**400, "number, not 1000"),
    ("backward_share", 1.5, "less than or equal to 1, not 1.5"),
    ("devices_per_node", 8.5, "a valid integer"),
    ("stages", np.ones(2), "a number, not array("),
    ("links", Link(1.0), "instance of Links, not Link(bandwidth=1.0, latency=0.0)"),
    ("strategy", 5, "'deepspeed_zero3' or 'pipeline', not 5"),
    ("algorithm", "butterfly", "'ring', 'hierarchical', 'tree' or 'fastest', not 'butterfly'"),
    ("schedule", None, "not None"),
]


@pytest.mark.parametrize("name, value, what", VALUES)
def test_a_value_is_refused_by_its_name_alone(name, value, what):
    problems = refused(a_setting, **{name: value})
    assert list(problems) == [name] and what in problems[name].what


def test_all_problems_are_reported_at_once():
    problems = refused(a_setting, step_seconds=-1.0, strategy="fdsp", devices_per_node=0)
    assert list(problems) == ["step_seconds", "devices_per_node", "strategy"]
    assert problems["strategy"].remedy == "did you mean fsdp?"
    for link, path in (("1",), "bandwidth"), ((float("inf"),), "bandwidth"), ((1e9, -1), "latency"):
        assert list(refused(Link, *link)) == [path]
    assert list(refused(Links, 1e9, Link(1e9))) == ["inside"]


def test_numpys_numbers_and_integral_floats_are_numbers():
    plain = a_setting(**STAGED, micro_batches=8)
    other = {"stages": 4.0, "micro_batches": np.int8(8), "devices_per_node": np.int64(4)}
    other |= {"step_seconds": np.float64(0.1), "gradient_bytes": np.int64(100e6)}
    links = Links(Link(np.float64(10 * GB), np.float64(1e-6)), BETWEEN)
    setting = a_setting(strategy="pipeline", **other, links=links)
    assert predict(setting, np.int64(16)) == predict(plain, 16) == predict(plain, 16.0)
    points = {np.int64(1): np.float64(0.1), 2.0: 0.12, 4: 0.12}
    assert fit(a_setting(), points) == fit(a_setting(), {1: 0.1, 2: 0.12, 4: 0.12})


def test_settings_that_would_go_unused_are_refused():
    for schedule in ("gpipe", "1f1b"):
        problems = refused(a_setting, **STAGED, schedule=schedule, pieces_per_stage=2)
        assert problems["pieces_per_stage"].what.endswith(f"not {schedule}")
        remedy = "schedule='interleaved' or schedule='zero_bubble'"
        assert problems["pieces_per_stage"].remedy == remedy
    problems = refused(a_setting, strategy="deepspeed_zero3", **PIECES)
    assert problems.keys() == PIECES.keys()
    assert problems["stages"].what == "4 belongs to a pipeline, and deepspeed_zero3 has none"
    # With a misspelt strategy or schedule they may be right.
    assert list(refused(a_setting, **{**PIECES, "strategy": "pipelin"})) == ["strategy"]
    assert list(refused(a_setting, **STAGED, schedule="inter", pieces_per_stage=2)) == ["schedule"]
    assert a_setting(stages=1, schedule="1f1b", activation_bytes=0) == a_setting()


def test_refused_numbers_of_devices():
    for count in ("8", 2.5, True, None, 0, NAN):
        problem = refused(predict, a_setting(), count)["num_devices"]
        assert problem.what.endswith(f"not {count!r}")
        assert table(a_setting(), [count])[0].missing == problem.what
    rows = {row.devices: row for row in table(a_setting(), [0, 1, 2, 3, 6, 8])}
    assert [n for n, row in rows.items() if row.prediction] == [1, 2, 3, 8]
    assert rows[6].missing == "6 devices do not fill nodes of 4"
    assert refused(predict, a_setting(), 6)["num_devices"].remedy == "4 or 8"
    assert "into pipelines of 4 stages" in table(a_setting(**STAGED), [2])[0].missing


POINTS = [
    ({2: 0.1}, "measured", "one device is missing"),
    ({1: 0.1, 8: 0.2}, "measured", "several devices of one node are missing"),
    ({1: 0.1, 2: -0.2}, "measured.2", "must be greater than 0"),
    ({1: 0.1, "2": 0.1}, "measured.2", "must be a number, not '2'"),
    ({0: 0.1, 1: 0.1, 2: 0.1}, "measured.0", ""),
    ([0.1, 0.2], "measured", "must be a valid dictionary"),
]


@pytest.mark.parametrize("points, path, what", POINTS)
def test_points_that_cannot_be_fitted(points, path, what):
    with pytest.raises(UserError) as error:
        fit(a_setting(), points)
    problem = error.value.problems[0]
    assert problem.path == path and problem.what.startswith(what)
