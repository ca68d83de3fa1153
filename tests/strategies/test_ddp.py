"""ddp, local_sgd and modules that step by hand, on two gloo ranks.

Every hook of ddp takes effect on a CPU, local_sgd is the algorithm of its papers written by hand,
and what FSDP2 would get wrong is refused.
"""

from __future__ import annotations

import pytest

from distdl.strategies.bucket_search import NOT_COUNTED, STEPS, BucketSearch
from tests.strategies.two_ranks import results

# One process group serves this file, test_traffic and test_loaders.
pytestmark = pytest.mark.xdist_group("two_ranks")


@pytest.fixture(scope="module")
def found() -> dict:
    return results("tests.strategies.ddp_cases")


@pytest.mark.parametrize("name", ["none", "bf16", "fp16", "powersgd", "static_graph", "thawed"])
def test_ranks_stay_equal(found, name) -> None:
    zero, one = found[f"ddp_{name}"]
    assert zero["checksum"] == one["checksum"] and zero["finite"]
    assert zero["losses"] != one["losses"]  # they have samples of their own


@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 1e-3), ("fp16", 1e-4)])
def test_half_precision_rounds_and_little_more(found, name, tolerance) -> None:
    """Equal to the last bit would mean that the hook was dropped."""
    plain, rounded = found["ddp_none"][0], found[f"ddp_{name}"][0]
    assert rounded["checksum"] != plain["checksum"]
    assert rounded["losses"] == pytest.approx(plain["losses"], abs=tolerance)


def test_powersgd_begins_at_its_step_in_several_buckets(found) -> None:
    """Steps 1 and 2 travel plainly, so the first three losses are those of plain DDP."""
    plain, low_rank = (found[name][0]["losses"] for name in ("ddp_none_again", "ddp_powersgd"))
    assert low_rank[:3] == plain[:3] and low_rank[3:] != plain[3:]
    assert low_rank == pytest.approx(plain, abs=0.1)
    assert found["ddp_powersgd"][0]["traffic"]["collectives"]["allreduce"]["calls"] == 2 * 3


@pytest.mark.parametrize("name", ["none_again", "static_graph"])
def test_buckets_and_static_graph_change_no_number(found, name) -> None:
    assert found[f"ddp_{name}"][0]["losses"] == found["ddp_none"][0]["losses"]
    assert found[f"ddp_{name}"][0]["checksum"] == found["ddp_none"][0]["checksum"]


def test_all_ranks_choose_the_same_bucket_size_while_they_train(found) -> None:
    zero, one = found["search"]
    assert zero["tried"] == [0.03, 1.0] and zero["chosen"] in zero["tried"]
    assert zero["chosen"] == one["chosen"]
    assert zero["checksum"] == one["checksum"] == found["ddp_none"][0]["checksum"]


def test_a_trace_shows_the_collectives_of_the_recorded_steps(found) -> None:
    """Two steps of one bucket each, on both ranks."""
    for names in found["trace"]:
        assert names.count("gloo:all_reduce") >= 2


def test_post_local_sgd_ends_with_equal_weights(found) -> None:
    """Averages after steps 5 and 8; with six steps the last average would be missing."""
    zero, one = found["ddp_post_local_sgd"]
    assert zero["checksum"] == one["checksum"]
    assert zero["losses"][:3] == found["ddp_none"][0]["losses"][:3]
    assert zero["losses"][3:] != found["ddp_none"][0]["losses"][3:]


def test_post_local_sgd_goes_on_exactly_from_between_two_averages(found) -> None:
    for rank in found["resume_post_local_sgd"]:
        assert rank["rest"] == rank["whole"]
        assert rank["rest_checksum"] == rank["whole_checksum"]


def test_powersgd_goes_on_with_two_plain_steps(found) -> None:
    """Its memory of errors is each rank's own and is in no checkpoint: documented, not exact."""
    zero, one = found["resume_powersgd"]
    assert zero["rest"][0] == zero["whole"][0]
    assert zero["rest"] == pytest.approx(zero["whole"], abs=0.05)
    assert zero["rest_checksum"] == one["rest_checksum"]


def test_checkpoints_are_portable(found) -> None:
    state = found["resume_post_local_sgd"][0]
    assert state["named"] == ["network.0.bias"] and "state_dict" in state["keys"]


def test_a_bucket_search_takes_the_slowest_rank_and_the_median() -> None:
    """Rank 1 is slow with small buckets: 1 MB is fastest here, and 5 MB for all."""
    other = iter([0.9, 0.3, 0.4])
    search = BucketSearch(20.5, lambda mine: [mine, next(other)], sizes_mb=(1, 5, 25))
    assert search.sizes == [1, 5, 21.0]  # 25 is as good as one bucket
    steps = {1: 0.1, 5: 0.2, 21.0: 0.3}
    changes = []
    for _ in range(3 * STEPS):
        size = search.size
        slow = 5.0 if len(search._steps) < NOT_COUNTED else steps[size]
        changes.append(search.timed(slow))
    assert search.seconds == {1: 0.9, 5: 0.3, 21.0: 0.4}
    assert search.done and search.size == 5
    assert sum(changes) == 3 and changes[STEPS - 1]
    assert search.describe() == "1 MB 900.0 ms, 5 MB 300.0 ms, 21 MB 400.0 ms: 5 MB"


def test_nothing_to_search_in_a_small_model() -> None:
    search = BucketSearch(0.5, lambda mine: [mine])
    assert search.done and search.size == 1 and not search.timed(1.0)


# ------------------------------------------------------------------------------------ local_sgd

OUTER = ("average", "nesterov")


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


# ---------------------------------------------------------------------------- fsdp, step by hand


@pytest.mark.parametrize("name", ["parts", "direct", "after", "inside"])
def test_fsdp_trains_what_ddp_trains(found, name: str) -> None:
    for fsdp, ddp in zip(found[f"fsdp_{name}"], found[f"ddp_{name}"], strict=True):
        assert len(fsdp["losses"]) >= 4
        assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        assert fsdp["sums"] == pytest.approx(ddp["sums"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [("penalty", "create_graph=True"), ("during", "training_step changes weights (target.")],
)
def test_what_fsdp_would_get_wrong_is_refused_on_all_ranks(found, name, said) -> None:
    for rank in found[f"fsdp_{name}"]:
        assert said in rank and "strategy=ddp" in rank
