"""ddp, local_sgd, modules that step by hand, and bytes per step, on two gloo ranks.

Every hook of ddp takes effect on a CPU, local_sgd is the algorithm of its papers written by hand,
and what FSDP2 would get wrong is refused.
"""

from itertools import cycle

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from distdl.callbacks.count_traffic import CountTraffic
from distdl.distributed.traffic import Traffic, in_words
from distdl.strategies.bucket_search import NOT_COUNTED, STEPS, BucketSearch
from tests.strategies.ddp_checks import CHECKS
from tests.strategies.ranks import Case, shared

# One process group serves this file and test_loaders.
pytestmark = pytest.mark.xdist_group("two_ranks")


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(check, tmp_path):
    shared(2).train(Case([check], tmp_path / "runs", call="tests.strategies.ddp_checks:run"))


def test_a_bucket_search_takes_the_slowest_rank_and_the_median():
    """Rank 1 is slow with small buckets: 1 MB is fastest here, and 5 MB for all."""
    other = iter([0.9, 0.3, 0.4])
    search = BucketSearch(20.5, lambda mine: [mine, next(other)], sizes_mb=(1, 5, 25))
    assert search.sizes == [1, 5, 21.0]  # 25 is as good as one bucket
    steps, changes = {1: 0.1, 5: 0.2, 21.0: 0.3}, []
    for number, _ in zip(cycle(range(STEPS)), range(3 * STEPS), strict=False):
        changes.append(search.add_step(5.0 if number < NOT_COUNTED else steps[search.size]))
    assert search.seconds == {1: 0.9, 5: 0.3, 21.0: 0.4}
    assert search.done and search.size == 5 and sum(changes) == 3 and changes[STEPS - 1]
    assert search.describe() == "1 MB 900.0 ms, 5 MB 300.0 ms, 21 MB 400.0 ms: 5 MB"
    small = BucketSearch(0.5, lambda mine: [mine])  # nothing to search
    assert small.done and small.size == 1 and not small.add_step(1.0)


def test_the_ring_sends_all_but_its_own_part_twice():
    traffic, tensor, four = Traffic(), torch.zeros(1000), torch.zeros(4000)
    traffic.add("allreduce_", ([tensor],), 4)
    assert (traffic.payload, traffic.sent) == (4000, 2 * 3 / 4 * 4000)
    traffic.add("_allgather_base_", (four, tensor), 4)
    traffic.add("_reduce_scatter_base_", (tensor, four), 4)
    traffic.add("send", ([tensor],), 4)
    sent = {name: tally.sent for name, tally in traffic.collectives.items() if name != "allreduce"}
    assert sent == {"_allgather_base": 12_000, "_reduce_scatter_base": 12_000, "send": 4000}
    before = traffic.sent
    traffic.add("recv_", ([tensor],), 4)
    traffic.add("allreduce_", ([tensor],), 1)
    assert traffic.sent == before


@pytest.mark.parametrize(("steps", "words"), [(1, "(1 step counted)"), (2, "(2 steps counted)")])
def test_the_line_at_the_end(steps, words, tmp_path, caplog):
    counter = CountTraffic()
    counter.steps = steps
    with caplog.at_level("INFO"):
        counter.on_train_end(Trainer(default_root_dir=tmp_path, logger=False), LightningModule())
    assert words in caplog.text


def test_sizes_in_words():
    values = (102_228_128, 1_500, 3)
    assert [in_words(value) for value in values] == ["102.2 MB", "1.5 kB", "3 B"]
