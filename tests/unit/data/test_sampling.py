"""The samplers' promises, over many sizes, ranks and points of a kill."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl.data.sampling import EvalBatches, Groups, RecentBatches, TrainBatches, TrainPosition
from distdl.datasets.order import Windows, by_group
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

    def ends(self, seed, epoch):
        return self.windows.ends(seed, epoch) if self.windows.applies(epoch) else ()

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


def groups_of(samples, seed, data=None):
    """Some groups, of which one is rare."""
    random = np.random.default_rng(seed)
    ends = data.ends if data else None
    return Groups(random.choice(4, samples, p=(0.6, 0.25, 0.13, 0.02)), ends)


@settings(max_examples=250, deadline=None)
@given(st.integers(1, 300) | REMOTE, SEEDS, st.sampled_from((1, 2, 4, 12)))
def test_a_global_batch_is_of_one_group_at_any_number_of_ranks(data, seed, size):
    """What the groups leave over, of each window fewer than a batch per group, comes last in it."""
    dataset = data if isinstance(data, Remote) else None
    samples, epoch = len(dataset) if dataset else data, seed % 3
    groups = groups_of(samples, seed, dataset)
    options = {"seed": seed, "dataset": dataset, "groups": groups}
    if samples < size:
        return
    one = global_batches(samples, size, 1, TrainPosition(epoch), **options)
    for world in (world for world in (2, 3, 4) if size % world == 0):
        at = TrainPosition(epoch)
        assert global_batches(samples, size // world, world, at, **options) == one
    order = global_batches(samples, 1, 1, TrainPosition(epoch), **options | {"groups": None})
    order = [index for (index,) in order]
    seen = Counter(index for step in one for index in step)
    assert max(seen.values()) == 1
    assert seen.total() == samples // size * size
    plain = dataset is None or not dataset.windows.applies(epoch)
    ends = [samples] if plain else dataset.windows.ends(seed, epoch)
    mixed = [step for step in one if len({int(groups.of_sample[i]) for i in step}) > 1]
    assert len(mixed) <= 4 * len(ends)
    if plain:
        assert one[len(one) - len(mixed) :] == mixed
    place = {index: number for number, index in enumerate(order)}
    if min(np.diff([0, *ends])) < size:
        return
    for start, end in pairwise([0, *ends]):  # nothing waits for the end of the window after next
        late = [i for step in one[end // size :] for i in step if place[i] < start]
        assert not late, (late, start, end)


@settings(max_examples=250, deadline=None)
@given(st.integers(1, 200) | REMOTE, SEEDS, st.lists(ATTEMPT, max_size=4), SIZES)
def test_killed_anywhere_and_resumed_at_any_size_each_group_goes_on(data, seed, attempts, last):
    """At one global batch size the batches are those of a run that nobody has killed; with others
    no sample is lost or repeated, but for the tails."""
    dataset = data if isinstance(data, Remote) else None
    samples, epoch = len(dataset) if dataset else data, seed % 4
    last = min(last, samples)
    options = {"seed": seed, "dataset": dataset, "groups": groups_of(samples, seed, dataset)}
    undisturbed = global_batches(samples, last, 1, TrainPosition(epoch), **options)
    position, seen, same = TrainPosition(epoch), [], True
    for batch, world, steps in [*attempts, (last, 1, samples)]:
        batch = batch or last
        if batch > samples or batch % world:
            continue
        rest = global_batches(samples, batch // world, world, position, **options)[:steps]
        assert batch == last or all(len(step) == batch for step in rest)
        same &= batch == last or not rest
        seen += rest
        # As a checkpoint keeps it: the resumed run has an object of its own.
        consumed = position.consumed + sum(map(len, rest))
        position = TrainPosition(epoch, consumed, sizes=[*position.sizes])
    flat = [index for step in seen for index in step]
    assert len(flat) == len({*flat})
    assert samples - len(flat) < 2 * 16
    if same:
        assert seen == undisturbed


def test_what_is_left_over_is_pooled_at_the_end():
    order, groups = np.array([4, 2, 7, 0, 1, 6, 3, 5]), np.array([0, 1, 0, 0, 0, 1, 1, 2])
    assert by_group(order, groups, 2).tolist() == [4, 2, 1, 6, 0, 3, 7, 5]


@pytest.mark.parametrize(
    ("consumed", "wanted"), [(0, [0, 1, 2]), (8, [0, 1, 2]), (16, [1, 2, 3]), (40, [7, 8, 9])]
)
def test_the_batches_of_before_come_again_and_nothing_notices(consumed, wanted):
    class Told:
        reached_by = 0

        def order(self, seed, epoch):
            return np.arange(43)[::-1].copy()

        def reached(self, seed, epoch, start, order):
            self.reached_by += 1

    position = TrainPosition(1, consumed)
    told = Told()
    options = {"rank": 1, "world_size": 2, "seed": 3, "shuffle": True, "dataset": told}
    batches = TrainBatches(43, 2, position=position, resume=False, **options)
    epoch = [*batches]
    before = told.reached_by
    recent = RecentBatches(batches, 3)
    assert [*recent] == [*recent] == [epoch[number] for number in wanted]
    assert len(recent) == 3
    assert (position, told.reached_by) == (TrainPosition(1, consumed), before)
