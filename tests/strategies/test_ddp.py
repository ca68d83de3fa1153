"""ddp, local_sgd and modules that step by hand, on two gloo ranks.

Every hook of ddp takes effect on a CPU, local_sgd is the algorithm of its papers written by hand,
and what FSDP2 would get wrong is refused.
"""

from itertools import cycle
from types import SimpleNamespace

import pytest

from distdl.strategies.bucket_search import NOT_COUNTED, STEPS, BucketSearch
from tests.strategies import own_steps
from tests.strategies.two_ranks import results

# One process group serves this file, test_traffic and test_loaders.
pytestmark = pytest.mark.xdist_group("two_ranks")


@pytest.fixture(scope="module")
def ranks():
    """Of a case, by rank; its values are attributes."""

    def of(name):
        return [SimpleNamespace(**rank) for rank in results("tests.strategies.ddp_cases")[name]]

    return of


@pytest.mark.parametrize("name", ["none", "bf16", "fp16", "powersgd", "static_graph", "thawed"])
def test_ranks_stay_equal(ranks, name):
    zero, one = ranks(f"ddp_{name}")
    assert zero.checksum == one.checksum and zero.finite
    assert zero.losses != one.losses  # they have samples of their own


@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 1e-3), ("fp16", 1e-4)])
def test_half_precision_rounds_and_little_more(ranks, name, tolerance):
    """Equal to the last bit would mean that the hook was dropped."""
    plain, rounded = ranks("ddp_none")[0], ranks(f"ddp_{name}")[0]
    assert rounded.checksum != plain.checksum
    assert rounded.losses == pytest.approx(plain.losses, abs=tolerance)


def test_powersgd_begins_at_its_step_in_several_buckets(ranks):
    """Steps 1 and 2 travel plainly, so the first three losses are those of plain DDP."""
    plain, low_rank = ranks("ddp_none_again")[0].losses, ranks("ddp_powersgd")[0]
    assert low_rank.losses[:3] == plain[:3] and low_rank.losses[3:] != plain[3:]
    assert low_rank.losses == pytest.approx(plain, abs=0.1)
    assert low_rank.traffic["collectives"]["allreduce"]["calls"] == 2 * 3


@pytest.mark.parametrize("name", ["none_again", "static_graph"])
def test_buckets_and_static_graph_change_no_number(ranks, name):
    one, other = ranks(f"ddp_{name}")[0], ranks("ddp_none")[0]
    assert (one.losses, one.checksum) == (other.losses, other.checksum)


def test_all_ranks_choose_the_same_bucket_size_while_they_train(ranks):
    zero, one = ranks("search")
    assert zero.tried == [0.03, 1.0] and zero.chosen in zero.tried
    assert zero.chosen == one.chosen
    assert zero.checksum == one.checksum == ranks("ddp_none")[0].checksum


def test_a_trace_shows_the_collectives_of_the_recorded_steps():
    """Two steps of one bucket each, on both ranks."""
    for names in results("tests.strategies.ddp_cases")["trace"]:
        assert names.count("gloo:all_reduce") >= 2


def test_post_local_sgd_ends_with_equal_weights(ranks):
    """Averages after steps 5 and 8; with six steps the last average would be missing."""
    (zero, one), plain = ranks("ddp_post_local"), ranks("ddp_none")[0].losses
    assert zero.checksum == one.checksum
    assert zero.losses[:3] == plain[:3] and zero.losses[3:] != plain[3:]


@pytest.mark.parametrize("name", ["post_local", "average", "nesterov"])
def test_resumes_exactly_from_between_two_meetings(ranks, name):
    """To the last bit, on each rank: inner momentum, outer momentum and weights."""
    for rank in ranks(f"resume_{name}"):
        assert rank.rest == rank.whole
        assert rank.named == ["network.0.bias"] and "state_dict" in rank.keys
        assert rank.momentum == (rank.names if name == "nesterov" else [])
        assert ("local_sgd" in rank.keys) is (name == "nesterov")


def test_powersgd_resumes_with_two_plain_steps(ranks):
    """Its memory of errors is each rank's own and is in no checkpoint: documented, not exact."""
    zero, one = ranks("resume_powersgd")
    (losses, checksum), (expected, _) = zero.rest, zero.whole
    assert losses[0] == expected[0] and losses == pytest.approx(expected, abs=0.05)
    assert checksum == one.rest[1]


def test_a_bucket_search_takes_the_slowest_rank_and_the_median():
    """Rank 1 is slow with small buckets: 1 MB is fastest here, and 5 MB for all."""
    other = iter([0.9, 0.3, 0.4])
    search = BucketSearch(20.5, lambda mine: [mine, next(other)], sizes_mb=(1, 5, 25))
    assert search.sizes == [1, 5, 21.0]  # 25 is as good as one bucket
    steps, changes = {1: 0.1, 5: 0.2, 21.0: 0.3}, []
    for number, _ in zip(cycle(range(STEPS)), range(3 * STEPS), strict=False):
        changes.append(search.timed(5.0 if number < NOT_COUNTED else steps[search.size]))
    assert search.seconds == {1: 0.9, 5: 0.3, 21.0: 0.4}
    assert search.done and search.size == 5 and sum(changes) == 3 and changes[STEPS - 1]
    assert search.describe() == "1 MB 900.0 ms, 5 MB 300.0 ms, 21 MB 400.0 ms: 5 MB"
    small = BucketSearch(0.5, lambda mine: [mine])  # nothing to search
    assert small.done and small.size == 1 and not small.timed(1.0)


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_is_the_algorithm_of_the_papers(ranks, outer):
    """Eight steps, meetings after 3, 6 and (the end) 8; the ranks are apart in between."""
    (zero, one), by_hand = ranks(f"local_{outer}"), ranks(f"by_hand_{outer}")[0]
    assert zero.weights == pytest.approx(by_hand.weights, abs=1e-6)
    assert zero.checksum == pytest.approx(by_hand.checksum, rel=1e-6) and zero.finite
    assert zero.checksum == one.checksum
    assert zero.losses != pytest.approx(ranks("ddp_none")[0].losses, abs=1e-3)


def test_meeting_at_every_step_is_ddp(ranks):
    """Without momentum, the mean of the weights after a step is the step of the mean gradient."""
    local, ddp = ranks("every_step")[0], ranks("ddp_plain_sgd")[0]
    assert local.losses == pytest.approx(ddp.losses, abs=1e-5)
    assert local.weights == pytest.approx(ddp.weights, abs=1e-6)


def test_validation_sees_the_same_weights_on_all_ranks(ranks):
    """After step 5, one step behind a meeting, batch norm and a moving average included."""
    zero, one = ranks("validation")
    assert len(zero.seen) == 1 and (zero.seen, zero.end) == (one.seen, one.end)


def test_ddp_opens_its_checkpoint(ranks):
    zero, one = ranks("to_ddp")
    assert zero.steps == 6 and zero.end == one.end
    # Its first loss is that of local_sgd resuming from the same checkpoint.
    assert zero.losses[0] == ranks("resume_nesterov")[0].rest[0][0]


def test_an_average_keeps_layout_and_types(ranks):
    for rank in ranks("average"):
        assert rank.values == [[0.5], [1.0], 0.5] and rank.channels_last
        assert rank.handed == 96 * 4 + 5 * 2 + 4


@pytest.mark.parametrize("name", own_steps.ALIKE)
def test_fsdp_trains_what_ddp_trains(ranks, name):
    for fsdp, ddp in zip(ranks(f"fsdp_{name}"), ranks(f"ddp_{name}"), strict=True):
        assert len(fsdp.losses) >= 4 and fsdp.losses == pytest.approx(ddp.losses, rel=1e-5)
        assert fsdp.sums == pytest.approx(ddp.sums, rel=1e-5)


MESSAGES = {"penalty": "create_graph=True", "during": "training_step changes weights (target."}


@pytest.mark.parametrize("name", own_steps.REFUSED)
def test_what_fsdp_would_get_wrong_is_refused_on_all_ranks(name):
    for message in results("tests.strategies.ddp_cases")[f"fsdp_{name}"]:
        assert MESSAGES[name] in message and "strategy=ddp" in message
