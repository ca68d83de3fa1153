"""local_sgd on two gloo ranks, against the same algorithm written by hand in one process."""

from __future__ import annotations

import pytest

from distdl.strategies.local_sgd import LocalSGDStrategy
from tests.strategies.two_ranks import results

pytestmark = pytest.mark.xdist_group("two_ranks")
OUTER = ("average", "nesterov")


@pytest.fixture(scope="module")
def found() -> dict:
    return results("tests.strategies.ddp_cases")


@pytest.mark.parametrize("outer", OUTER)
def test_is_the_algorithm_of_the_papers(found, outer) -> None:
    """Eight steps, meetings after 3, 6 and (the end) 8."""
    ours, by_hand = found[f"local_{outer}"][0], found[f"by_hand_{outer}"][0]
    assert ours["weights"] == pytest.approx(by_hand["weights"], abs=1e-6)
    assert ours["checksum"] == pytest.approx(by_hand["checksum"], rel=1e-6)
    assert ours["checksum"] == found[f"local_{outer}"][1]["checksum"]


def test_meeting_at_every_step_is_ddp(found) -> None:
    """Without momentum, the mean of the weights after a step is the step of the mean gradient."""
    ours, ddp = found["every_step"][0], found["ddp_plain_sgd"][0]
    assert ours["losses"] == pytest.approx(ddp["losses"], abs=1e-5)
    assert ours["weights"] == pytest.approx(ddp["weights"], abs=1e-6)


def test_ranks_are_apart_between_meetings(found) -> None:
    assert found["local_average"][0]["losses"] != pytest.approx(
        found["ddp_none"][0]["losses"], abs=1e-3
    )


@pytest.mark.parametrize("outer", OUTER)
def test_goes_on_exactly_from_between_two_meetings(found, outer) -> None:
    """To the last bit, on each rank: inner momentum, outer momentum and weights."""
    for rank in found[f"resume_{outer}"]:
        assert rank["rest"] == rank["whole"]
        assert rank["rest_checksum"] == rank["whole_checksum"]


def test_the_outer_momentum_is_kept_by_name(found) -> None:
    state = found["resume_nesterov"][0]
    assert state["momentum"] == state["names"]
    assert "local_sgd" not in found["resume_average"][0]["keys"]


def test_validation_sees_the_same_weights_on_all_ranks(found) -> None:
    """After step 5, one step behind a meeting, batch norm and a moving average included."""
    zero, one = found["validation"]
    assert len(zero["seen"]) == 1
    assert zero["seen"] == one["seen"]
    assert zero["end"] == one["end"]


def test_ddp_opens_its_checkpoint(found) -> None:
    zero, one = found["to_ddp"]
    assert zero["steps"] == 6 and zero["end"] == one["end"]
    # Its first loss is that of local_sgd going on from the same checkpoint.
    assert zero["losses"][0] == found["resume_nesterov"][0]["rest"][0]


def test_an_average_keeps_layout_and_types(found) -> None:
    for rank in found["average"]:
        assert rank["values"] == [[0.5], [1.0], 0.5]
        assert rank["channels_last"]
        assert rank["handed"] == 96 * 4 + 5 * 2 + 4


@pytest.mark.parametrize(
    ("node", "path", "remedy"),
    [
        ({"sync_every": 0}, "sync_every", "=32"),
        ({"outer": "adam"}, "outer", "nesterov"),
        ({"outer_lr": 0.5}, "outer_lr", "nesterov"),
        ({"outer": "nesterov", "outer_lr": 0}, "outer_lr", "=0.7"),
        ({"outer": "nesterov", "outer_momentum": 1.0}, "outer_momentum", "=0.9"),
    ],
)
def test_refusals(node, path, remedy) -> None:
    (problem,) = LocalSGDStrategy.check(node, {})
    assert problem.path == path and remedy in problem.remedy, problem


@pytest.mark.parametrize(
    ("trainer", "remedy"),
    [
        ({"precision": "16-mixed"}, "trainer.precision=bf16-mixed"),
        ({"sync_batchnorm": True}, "trainer.sync_batchnorm=false"),
    ],
)
def test_settings_of_the_trainer_that_it_refuses(trainer, remedy) -> None:
    (problem,) = LocalSGDStrategy.check({}, {"config": {"trainer": trainer}})
    assert problem.remedy == remedy


def test_what_is_accepted() -> None:
    assert not list(LocalSGDStrategy.check({}, {}))
    node = {"sync_every": 500, "outer": "nesterov", "outer_lr": 0.4, "outer_momentum": 0.8}
    assert not list(LocalSGDStrategy.check(node, {}))
