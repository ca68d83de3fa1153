"""ddp on two gloo ranks: every hook takes effect on a CPU, and what it changes is what it says."""

from __future__ import annotations

import pytest

from distdl import signatures
from distdl.strategies.bucket_search import NOT_COUNTED, STEPS, BucketSearch
from distdl.strategies.ddp import DDPStrategy
from tests.strategies.two_ranks import results

# One process group serves this file, test_local_sgd and test_traffic.
pytestmark = pytest.mark.xdist_group("two_ranks")
CONTEXT = {"num_nodes": 1, "devices": 2, "world_size": 2, "accelerator": "cpu", "local": True}


@pytest.fixture(scope="module")
def found() -> dict:
    return results("tests.strategies.ddp_cases")


@pytest.mark.parametrize(
    "name", ["none", "bf16", "fp16", "powersgd", "static_graph", "auto", "thawed"]
)
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


@pytest.mark.parametrize("name", ["none_again", "static_graph", "auto"])
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


@pytest.mark.parametrize(
    ("node", "path", "remedy"),
    [
        ({"comm_hook": "fp8"}, "comm_hook", "bf16"),
        ({"comm_hook": "powersgd", "powersgd_rank": 0}, "powersgd_rank", "=1"),
        ({"comm_hook": "powersgd", "hook_start_step": 1}, "hook_start_step", "=2"),
        ({"comm_hook": "powersgd", "bucket_cap_mb": "auto"}, "bucket_cap_mb", "=25"),
        ({"comm_hook": "post_local_sgd", "average_every": 1}, "average_every", "=4"),
        ({"powersgd_rank": 4}, "powersgd_rank", "comm_hook=powersgd"),
        ({"comm_hook": "bf16", "average_every": 8}, "average_every", "post_local_sgd"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb", "=25"),
    ],
)
def test_refusals(node, path, remedy) -> None:
    (problem,) = DDPStrategy.check(node, CONTEXT)
    assert problem.path == path and remedy in problem.remedy, problem


@pytest.mark.parametrize("mode", [True, "default", "measured", False])
def test_no_search_for_buckets_under_compiled_code(mode) -> None:
    context = {**CONTEXT, "config": {"model": {"compile": mode}}}
    found = list(DDPStrategy.check({"bucket_cap_mb": "auto"}, context))
    assert [p.path for p in found] == (["bucket_cap_mb"] if mode else [])
    assert not list(DDPStrategy.check({"bucket_cap_mb": 5}, context))


def test_types_of_ddps_own_settings() -> None:
    """They are in torch's signature, and are switches there by their defaults."""
    takes = signatures.takes(DDPStrategy)
    node = {
        "static_graph": "maybe",
        "gradient_as_bucket_view": 7,
        "find_unused_parameters": True,
        "process_group_backend": 3,
        "bucket_view": True,
    }
    found = {name: what for name, what, _ in signatures.bind(takes, node)}
    assert found.pop("bucket_view") == "unknown argument"
    assert found.pop("process_group_backend") == "must be a string or null, not {}"
    assert found == dict.fromkeys(
        ("static_graph", "gradient_as_bucket_view"), "must be true or false, not {}"
    )


def test_what_is_accepted() -> None:
    assert not list(DDPStrategy.check({}, CONTEXT))
    node = {"comm_hook": "post_local_sgd", "hook_start_step": 0, "average_every": 16}
    assert not list(DDPStrategy.check(node, CONTEXT))
    assert not list(DDPStrategy.check({"comm_hook": "bf16", "bucket_cap_mb": "auto"}, CONTEXT))


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
