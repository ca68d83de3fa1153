"""The samplers' promises, over many sizes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl.data.sampling import EvalBatches, SampleKey, TrainBatches, TrainPosition
from distdl.datasets.order import Windows, by_first_use
from distdl.util.errors import UserError
from distdl.util.seeds import stable_seed


def train_batches(samples, batch, world, position=None, seed=0, shuffle=True, **kwargs):
    """One sampler per rank."""
    kwargs |= {"seed": seed, "shuffle": shuffle, "position": position or TrainPosition()}
    return [TrainBatches(samples, batch, rank=r, world_size=world, **kwargs) for r in range(world)]


def global_batches(samples, batch, world, position=None, **kwargs):
    """The samples of each global batch, in rank order."""
    ranks = [list(s) for s in train_batches(samples, batch, world, position, **kwargs)]
    assert len({len(batches) for batches in ranks}) == 1
    steps = [[key.index for rank in step for key in rank] for step in zip(*ranks, strict=True)]
    assert all(len(step) == batch * world for step in steps)
    return steps


def test_every_world_size_sees_the_same_global_batches():
    alone = global_batches(101, 12, 1)
    assert alone == global_batches(101, 6, 2) == global_batches(101, 4, 3)
    assert alone != global_batches(101, 12, 1, seed=1)
    assert alone != global_batches(101, 12, 1, TrainPosition(epoch=1))


def test_the_position_counts_when_iter_is_called():
    position = TrainPosition()
    sampler = train_batches(64, 4, 1, position)[0]
    first = iter(sampler)
    position.epoch, position.consumed = 1, 32
    second = iter(sampler)
    position.consumed = 60
    assert (len(list(first)), len(list(second)), len(list(sampler))) == (16, 8, 1)
    assert all(key.epoch == 1 for keys in sampler for key in keys)


def test_a_sampler_that_does_not_resume_starts_the_epoch_anew():
    batches = global_batches(64, 4, 1, TrainPosition(2, 32), resume=False)
    assert batches == global_batches(64, 4, 1, TrainPosition(2))


def test_without_shuffling_the_order_is_the_datasets():
    batches = global_batches(7, 2, 1, TrainPosition(epoch=5), shuffle=False)
    assert batches == [[0, 1], [2, 3], [4, 5]]


def test_too_few_samples_for_one_global_batch_names_the_numbers():
    with pytest.raises(UserError) as refused:
        train_batches(10, 4, 3)
    assert refused.value.problems[0].path == "data.batch_size"
    assert "10 training samples" in str(refused.value) and "4 x 3 = 12" in str(refused.value)
    assert "data.batch_size=3" in str(refused.value)


def test_resume_costs_no_more_than_a_start():
    def lines_of_first_batch(consumed):
        sampler, lines = train_batches(100_000, 4, 1, TrainPosition(0, consumed))[0], 0

        def trace(frame, event, argument):
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            next(iter(sampler))
        finally:
            sys.settrace(before)
        return lines

    start, resumed = (lines_of_first_batch(consumed) for consumed in (0, 99_000))
    assert resumed < start + 20  # no sample is passed over one by one


def evaluation(samples, batch, world, **kwargs):
    return [
        list(EvalBatches(samples, batch, rank=r, world_size=world, **kwargs)) for r in range(world)
    ]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 9))
def test_exact_evaluation_counts_each_sample_once_in_equal_shapes(samples, batch, world):
    ranks = evaluation(samples, batch, world)
    counted = [key.index for rank in ranks for keys in rank for key in keys if key.weight]
    assert sorted(counted) == list(range(samples))
    assert len({tuple(len(keys) for keys in rank) for rank in ranks}) == 1
    assert len({len(keys) for rank in ranks for keys in rank}) == 1
    fillers = [key for rank in ranks for keys in rank for key in keys if not key.weight]
    assert all(key.index == 0 for key in fillers)
    assert len(EvalBatches(samples, batch, rank=0, world_size=world)) == len(ranks[0])


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 9))
def test_repeating_evaluation_evens_the_ranks_out(samples, batch, world):
    ranks = evaluation(samples, batch, world, exact=False)
    assert len({tuple(len(keys) for keys in rank) for rank in ranks}) == 1
    keys = [key for rank in ranks for batch_keys in rank for key in batch_keys]
    assert {key.index for key in keys} == set(range(samples)) and all(k.weight for k in keys)
    assert len(keys) == samples + -samples % world


def test_evaluations_at_the_edge():
    assert evaluation(2, 8, 3)[2] == [[SampleKey(0, 0, 0.0)]], "a rank may have fillers only"
    dropped = evaluation(21, 4, 2, exact=False, drop_last=True)
    assert [[len(keys) for keys in rank] for rank in dropped] == [[4, 4], [4, 4]]
    assert evaluation(0, 4, 2) == [[], []]


def test_stable_seed_is_a_fixed_function():
    # A literal: a change would break the resume of every run under way.
    assert stable_seed(1, 2, 3) == stable_seed(1, 2, 3) != stable_seed(1, 3, 2)
    assert stable_seed(0, 0, 0) == 9169699564768075551


# What must hold for any sizes, ranks and kill points, tried out by hypothesis.

SEEDS = st.integers(0, 2**40)
GLOBAL_BATCHES = st.sampled_from((1, 2, 3, 4, 6, 12, 16))


def worlds_of(global_batch):
    return [n for n in range(1, global_batch + 1) if global_batch % n == 0]


class Afar:
    """A dataset of shards that come from afar, with its own order; records how far it came."""

    def __init__(self, shards, window, every_epoch):
        self.shards = tuple(shards)
        self.windows = Windows(self.shards, window, every_epoch)
        self.places = []

    def __len__(self):
        return sum(self.shards)

    def order(self, seed, epoch):
        return self.windows.order(seed, epoch) if self.windows.applies(epoch) else None

    def reached(self, seed, epoch, place, order):
        self.places.append(place)


DATASETS = st.one_of(
    st.none(),
    st.builds(
        Afar,
        st.lists(st.integers(1, 20), min_size=1, max_size=12),
        st.integers(1, 8),
        st.booleans(),
    ),
)


@st.composite
def histories(draw):
    """Number of samples, their dataset if it has an order, the global batch, and attempts, each of
    a world size and a number of steps after which it is killed."""
    dataset = draw(DATASETS)
    samples = len(dataset) if dataset else draw(st.integers(1, 200))
    batch = draw(GLOBAL_BATCHES.filter(lambda n: n <= samples))
    attempts = st.tuples(st.sampled_from(worlds_of(batch)), st.integers(0, 9))
    return samples, dataset, batch, draw(st.lists(attempts, max_size=4))


@settings(max_examples=150, deadline=None)
@given(histories(), SEEDS, st.integers(0, 3))
def test_killed_anywhere_and_resumed_at_any_world_size_nothing_is_lost_or_repeated(
    history, seed, epoch
):
    samples, dataset, batch, attempts = history
    position = TrainPosition(epoch)
    alone = {"seed": seed, "dataset": dataset}
    whole = global_batches(samples, batch, 1, TrainPosition(epoch), **alone)
    trained = []
    # The last attempt is not killed.
    for world, steps in [*attempts, (worlds_of(batch)[-1], samples)]:
        rest = global_batches(samples, batch // world, world, position, **alone)
        trained += rest[:steps]
        position.consumed += batch * len(rest[:steps])
    assert trained == whole
    seen = [index for step in trained for index in step]
    assert len(set(seen)) == len(seen) == samples // batch * batch
    assert set(seen) <= set(range(samples))


@settings(max_examples=100, deadline=None)
@given(histories(), SEEDS, st.lists(st.tuples(GLOBAL_BATCHES, st.integers(0, 9)), max_size=4))
def test_another_global_batch_goes_on_in_the_same_order(history, seed, attempts):
    samples, dataset, _, _ = history
    order = [i for step in global_batches(samples, 1, 1, seed=seed, dataset=dataset) for i in step]
    assert sorted(order) == list(range(samples))
    position, seen = TrainPosition(), []
    for batch, steps in attempts:
        if batch > samples:
            continue
        rest = global_batches(samples, batch, 1, position, seed=seed, dataset=dataset)[:steps]
        seen += [index for step in rest for index in step]
        position.consumed = len(seen)
    assert seen == order[: len(seen)]


@settings(max_examples=100, deadline=None)
@given(DATASETS.filter(bool), SEEDS)
def test_windows_need_few_shards_at_a_time_and_mix_what_they_have(dataset, seed):
    windows, shards = dataset.windows, np.repeat(np.arange(len(dataset.shards)), dataset.shards)
    for epoch in (0, 1):
        order, start = windows.order(seed, epoch), 0
        assert sorted(order) == list(range(len(dataset)))
        assert (order == windows.order(seed, epoch)).all()
        for window in windows.shards(seed, epoch):
            part = order[start : start + sum(dataset.shards[s] for s in window)]
            assert len(window) <= windows.window and set(shards[part]) == set(window)
            start += len(part)
        assert start == len(dataset)
        needed = by_first_use(shards, order)
        assert sorted(needed) == sorted(range(len(dataset.shards)))
    if len(dataset) > 20:  # below, two epochs may well be equal
        assert (windows.order(seed, 0) != windows.order(seed, 1)).any()


@settings(max_examples=100, deadline=None)
@given(DATASETS.filter(bool), SEEDS, st.integers(0, 2), st.integers(0, 240))
def test_no_shard_that_is_still_needed_looks_as_if_it_were_not(dataset, seed, epoch, place):
    windows, shards = dataset.windows, np.repeat(np.arange(len(dataset.shards)), dataset.shards)
    place = min(place, len(dataset) - 1)
    uses = windows.next_uses(seed, epoch, place)
    for shard in set(shards[windows.order(seed, epoch)[place:]]):
        last = max(np.flatnonzero(shards[windows.order(seed, epoch)] == shard))
        assert uses[shard] <= last < len(dataset)


@settings(max_examples=50, deadline=None)
@given(DATASETS.filter(bool), SEEDS, st.integers(0, 9))
def test_the_dataset_is_told_how_far_each_batch_has_come(dataset, seed, steps):
    batch = min(4, len(dataset))
    position = TrainPosition(0, min(steps, len(dataset) // batch) * batch)
    dataset.places.clear()
    rest = global_batches(len(dataset), batch, 1, position, seed=seed, dataset=dataset)
    assert dataset.places == [position.consumed + batch * step for step in range(len(rest))]
