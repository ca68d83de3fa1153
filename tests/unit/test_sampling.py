"""The samplers' promises, over many sizes, ranks and points of a kill."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl.data.sampling import EvalBatches, TrainBatches, TrainPosition
from distdl.datasets.order import Windows, by_first_use
from distdl.util.errors import UserError
from distdl.util.seeds import stable_seed

SEEDS, SIZES = st.integers(0, 2**40), st.sampled_from((1, 2, 3, 4, 6, 12, 16))


def train_batches(samples, batch, world, position=None, seed=0, shuffle=True, **kwargs):
    """One sampler per rank."""
    kwargs |= {"seed": seed, "shuffle": shuffle, "position": position or TrainPosition()}
    return [TrainBatches(samples, batch, rank=r, world_size=world, **kwargs) for r in range(world)]


def global_batches(samples, batch, world, position=None, **kwargs):
    """The samples of each global batch, in rank order."""
    ranks = [list(s) for s in train_batches(samples, batch, world, position, **kwargs)]
    steps = [[key.index for rank in step for key in rank] for step in zip(*ranks, strict=True)]
    assert all(len(step) == batch * world for step in steps)
    return steps


def test_what_an_order_depends_on():
    alone = global_batches(101, 12, 1)
    assert alone == global_batches(101, 6, 2) == global_batches(101, 4, 3)
    assert alone != global_batches(101, 12, 1, seed=1)
    assert alone != global_batches(101, 12, 1, TrainPosition(epoch=1))
    restarted = global_batches(64, 4, 1, TrainPosition(2, 32), resume=False)
    assert restarted == global_batches(64, 4, 1, TrainPosition(2))
    unshuffled = global_batches(7, 2, 1, TrainPosition(epoch=5), shuffle=False)
    assert unshuffled == [[0, 1], [2, 3], [4, 5]]
    # A literal: a change would break the resume of every run under way.
    assert stable_seed(0, 0, 0) == 9169699564768075551
    assert stable_seed(1, 2, 3) == stable_seed(1, 2, 3) != stable_seed(1, 3, 2)


def test_the_position_counts_when_iter_is_called():
    position = TrainPosition()
    sampler = train_batches(64, 4, 1, position)[0]
    first = iter(sampler)
    position.epoch, position.consumed = 1, 32
    second = iter(sampler)
    position.consumed = 60
    assert (len(list(first)), len(list(second)), len(list(sampler))) == (16, 8, 1)
    assert all(key.epoch == 1 for keys in sampler for key in keys)


class Batches:
    """A user's batch sampler, whose batches have several sizes."""

    def order(self, seed, epoch):
        order = np.empty(10, object)
        order[:] = [(number, number + 20)[: 1 + number % 2] for number in range(10)]
        return order

    def reached(self, *_):
        pass


@pytest.mark.parametrize(
    ("size", "batch", "options"),
    [(40, 4, {}), (40, 4, {"shuffle": False}), (10, 1, {"dataset": Batches(), "batched": True})],
)
def test_the_samples_of_the_batch_that_is_trained_on(size, batch, options):
    """Loaders fetch batches early; what counts is the position of the training."""
    for sampler in train_batches(size, batch, 2, position := TrainPosition(1), **options):
        assert sampler.current() == []
        position.consumed = 2 * batch
        batches = [[key.index for key in keys] for keys in sampler]
        for each in batches:
            assert sampler.current() == each
            position.consumed += 2 * batch
        assert len(batches) == 4 and sampler.current() == []


def test_too_few_samples_for_one_global_batch():
    with pytest.raises(UserError, match=r"10 training samples.*4 x 3 = 12") as error:
        train_batches(10, 4, 3)
    (problem,) = error.value.problems
    assert problem.path == "data.batch_size" and "data.batch_size=3" in problem.remedy


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

    assert lines_of_first_batch(99_000) < lines_of_first_batch(0) + 20  # none is passed over


def evaluation(samples, batch, world, **kwargs):
    samplers = [
        EvalBatches(samples, batch, rank=r, world_size=world, **kwargs) for r in range(world)
    ]
    ranks = [list(sampler) for sampler in samplers]
    assert {len(sampler) for sampler in samplers} == {len(rank) for rank in ranks}
    assert len({tuple(len(keys) for keys in rank) for rank in ranks}) == 1, "unequal shapes"
    return ranks


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 9))
def test_evaluation_counts_each_sample_once_or_repeats_some(samples, batch, world):
    ranks = evaluation(samples, batch, world)
    keys = [key for rank in ranks for keys in rank for key in keys]
    assert sorted(key.index for key in keys if key.weight) == list(range(samples))
    assert all(key.index == 0 for key in keys if not key.weight)
    assert len({len(keys) for rank in ranks for keys in rank}) == 1
    ranks = evaluation(samples, batch, world, exact=False)
    keys = [key for rank in ranks for keys in rank for key in keys]
    assert {key.index for key in keys} == set(range(samples)) and all(k.weight for k in keys)
    assert len(keys) == samples + -samples % world


def test_evaluations_at_the_edge():
    dropped = evaluation(21, 4, 2, exact=False, drop_last=True)
    assert [[len(keys) for keys in rank] for rank in dropped] == [[4, 4], [4, 4]]
    assert evaluation(0, 4, 2) == [[], []]


class Remote:
    """A dataset of shards with an order of its own; records how far it was read."""

    def __init__(self, shards, window, every_epoch):
        self.sizes = tuple(shards)
        self.windows = Windows(self.sizes, window, every_epoch)
        self.shards = np.repeat(np.arange(len(shards)), shards)  # of each sample
        self.positions = []

    def __len__(self):
        return sum(self.sizes)

    def order(self, seed, epoch):
        return self.windows.order(seed, epoch) if self.windows.applies(epoch) else None

    def reached(self, seed, epoch, place, order):
        self.positions.append(place)


SHARDS = st.lists(st.integers(1, 20), min_size=1, max_size=12)
REMOTE = st.builds(Remote, SHARDS, st.integers(1, 8), st.booleans())


@st.composite
def data(draw):
    """Number of samples, and their dataset if it has an order."""
    dataset = draw(st.one_of(st.none(), REMOTE))
    return len(dataset) if dataset else draw(st.integers(1, 200)), dataset


# Global batch (None: that of the last attempt), world size, steps before the kill.
ATTEMPTS = st.lists(
    st.tuples(st.none() | SIZES, st.sampled_from((1, 2, 3, 4)), st.integers(0, 9)), max_size=4
)


@settings(max_examples=250, deadline=None)
@given(data(), SEEDS, ATTEMPTS, SIZES)
def test_killed_anywhere_and_resumed_at_any_size_the_order_is_the_same(data, seed, attempts, last):
    """Nothing is lost or repeated, but for the tail that fills no global batch."""
    (samples, dataset), epoch = data, seed % 4
    options = {"seed": seed, "dataset": dataset}
    steps = global_batches(samples, 1, 1, TrainPosition(epoch), **options)
    order = [index for step in steps for index in step]
    assert sorted(order) == list(range(samples))
    position, seen, last, tail = TrainPosition(epoch), [], min(last, samples), 1
    for batch, world, steps in [*attempts, (last, 1, samples)]:
        batch = batch or last
        if batch <= samples and batch % world == 0:
            rest = global_batches(samples, batch // world, world, position, **options)[:steps]
            seen += [index for step in rest for index in step]
            position.consumed = len(seen)
            tail = 2 if batch != last else tail
    assert seen == order[: len(seen)] and len(order) - len(seen) < tail * last


@settings(max_examples=100, deadline=None)
@given(REMOTE, SEEDS, st.integers(0, 240))
def test_windows_need_few_shards_at_a_time_and_mix_what_they_have(dataset, seed, place):
    windows, shards = dataset.windows, dataset.shards
    for epoch in (0, 1):
        order, start = windows.order(seed, epoch), 0
        assert sorted(order) == list(range(len(dataset)))
        assert (order == windows.order(seed, epoch)).all()
        for window in windows.shards(seed, epoch):
            part = order[start : start + sum(dataset.sizes[s] for s in window)]
            assert len(window) <= windows.window and set(shards[part]) == set(window)
            start += len(part)
        assert start == len(dataset)
        assert sorted(by_first_use(shards, order)) == sorted(range(len(dataset.sizes)))
        # No shard that is still needed looks as if it were not.
        place = min(place, len(dataset) - 1)
        uses = windows.next_uses(seed, epoch, place)
        for shard in set(shards[order[place:]]):
            assert uses[shard] <= max(np.flatnonzero(shards[order] == shard)) < len(dataset)
    if len(dataset) > 20:  # below, two epochs may well be equal
        assert (windows.order(seed, 0) != windows.order(seed, 1)).any()


@settings(max_examples=50, deadline=None)
@given(REMOTE, SEEDS, st.integers(0, 9))
def test_each_batch_is_reported_to_the_dataset(dataset, seed, steps):
    batch = min(4, len(dataset))
    position = TrainPosition(0, min(steps, len(dataset) // batch) * batch)
    rest = global_batches(len(dataset), batch, 1, position, seed=seed, dataset=dataset)
    assert dataset.positions == [position.consumed + batch * step for step in range(len(rest))]
