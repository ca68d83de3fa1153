"""The samplers' promises, over many sizes, ranks and points of a kill."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from distdl.data.sampling import EvalBatches, TrainBatches, TrainPosition
from distdl.datasets.order import Windows
from distdl.util.seeds import stable_seed
from tests.prepared import refusal

SEEDS = st.integers(0, 2**40)
SIZES = st.sampled_from((1, 2, 3, 4, 6, 12, 16))


def train_batches(samples, batch, world, position=None, seed=0, **kwargs):
    """One sampler per rank."""
    kwargs |= {"seed": seed, "shuffle": True, "position": position or TrainPosition()}
    return [TrainBatches(samples, batch, rank=r, world_size=world, **kwargs) for r in range(world)]


def global_batches(samples, batch, world, position=None, **kwargs):
    """The samples of each global batch, in rank order."""
    ranks = [list(s) for s in train_batches(samples, batch, world, position, **kwargs)]
    steps = [[key.index for rank in step for key in rank] for step in zip(*ranks, strict=True)]
    assert all(len(step) == batch * world for step in steps)
    return steps


def test_what_an_order_depends_on():
    alone = global_batches(101, 12, 1)
    assert alone != global_batches(101, 12, 1, seed=1)
    assert alone != global_batches(101, 12, 1, TrainPosition(epoch=1))
    # Literals: a change would break the resume of every run under way.
    assert stable_seed(0, 0, 0) == 9169699564768075551
    assert Windows((3, 2, 4), 2).order(5, 0).tolist() == [3, 4, 1, 0, 2, 6, 7, 8, 5]


def test_too_few_samples_for_one_global_batch():
    problem = refusal(train_batches, 10, 4, 3)
    assert problem.path == "data.batch_size"
    assert "data.batch_size=3" in problem.remedy
    assert "10 training samples" in problem.what
    assert "4 x 3 = 12" in problem.what


def evaluation(samples, batch, world, **kwargs):
    ranks = [EvalBatches(samples, batch, rank=r, world_size=world, **kwargs) for r in range(world)]
    batches = [list(rank) for rank in ranks]
    assert [len(rank) for rank in ranks] == [len(rank) for rank in batches]
    assert len({tuple(len(keys) for keys in rank) for rank in batches}) == 1, "unequal shapes"
    return batches


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 9))
def test_evaluation_counts_each_sample_once_or_repeats_some(samples, batch, world):
    ranks = evaluation(samples, batch, world)
    keys = [key for rank in ranks for keys in rank for key in keys]
    assert sorted(key.index for key in keys if key.weight) == list(range(samples))
    assert all(key.index == 0 for key in keys if not key.weight)
    assert len({len(keys) for rank in ranks for keys in rank}) == min(samples, 1)
    ranks = evaluation(samples, batch, world, exact=False)
    keys = [key for rank in ranks for keys in rank for key in keys]
    assert {key.index for key in keys} == set(range(samples))
    assert all(k.weight for k in keys)
    assert len(keys) == samples + -samples % world
    for rank in evaluation(samples, batch, world, exact=False, drop_last=True):
        assert [len(keys) for keys in rank] == [batch] * (math.ceil(samples / world) // batch)


class Remote:
    """A dataset of shards with an order of its own; records how far it was read."""

    def __init__(self, shards, window, every_epoch):
        self.sizes = tuple(shards)
        self.windows = Windows(self.sizes, window, every_epoch)
        self.positions = []

    def __len__(self):
        return sum(self.sizes)

    def order(self, seed, epoch):
        return self.windows.order(seed, epoch) if self.windows.applies(epoch) else None

    def reached(self, seed, epoch, place, order):
        self.positions.append(place)


SHARDS = st.lists(st.integers(1, 20), min_size=1, max_size=12)
REMOTE = st.builds(Remote, SHARDS, st.integers(1, 8), st.booleans())
# Global batch (None: that of the last attempt), world size, steps before the kill.
ATTEMPT = st.tuples(st.none() | SIZES, st.sampled_from((1, 2, 3, 4)), st.integers(0, 9))


@settings(max_examples=250, deadline=None)
@given(st.integers(1, 200) | REMOTE, SEEDS, st.lists(ATTEMPT, max_size=4), SIZES)
def test_killed_anywhere_and_resumed_at_any_size_the_order_is_the_same(data, seed, attempts, last):
    """Nothing is lost or repeated, but for the tail that fills no global batch."""
    dataset = data if isinstance(data, Remote) else None
    samples = len(dataset) if dataset else data
    epoch = seed % 4
    options = {"seed": seed, "dataset": dataset}
    reported = dataset.positions if dataset else []
    order = [index for (index,) in global_batches(samples, 1, 1, TrainPosition(epoch), **options)]
    assert sorted(order) == list(range(samples))
    position = TrainPosition(epoch)
    seen = []
    last = min(last, samples)
    tail = 1
    for batch, world, steps in [*attempts, (last, 1, samples)]:
        batch = batch or last
        if batch <= samples and batch % world == 0:
            reported.clear()
            rest = global_batches(samples, batch // world, world, position, **options)
            places = [position.consumed + batch * number for number in range(len(rest))]
            assert reported == places * (world if dataset else 0)
            seen += [index for step in rest[:steps] for index in step]
            position.consumed = len(seen)
            tail = 2 if batch != last else tail
    assert seen == order[: len(seen)]
    assert len(order) - len(seen) < tail * last
