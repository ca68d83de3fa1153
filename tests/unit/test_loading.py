"""Samplers, batch samplers and loaders of a user's own, by themselves."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from distdl.data.drawing import Drawn
from distdl.data.sampling import TrainPosition
from distdl.util.errors import UserError
from tests.unit.sample_data import Augmented, Loaders, draw_all, share


class Generated(Sampler[Any]):
    """Draws from a generator of its own, or from one that everybody shares."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        return (np.int64(round(self.generator.random() * 23)) for _ in range(24))


class ByCount(Sampler[int]):
    count = 0

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        return iter(torch.randperm(24, generator=generator).tolist())


class ByEpoch(ByCount):
    def set_epoch(self, epoch: int) -> None:
        self.count = epoch


class Batches(Sampler[list[int]]):
    """Of 1, 2, 3 samples in turn, in another order in each epoch."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        starts = torch.randperm(12).tolist()
        return iter([[2 * s + k % 2 for k in range(1 + s % 3)] for s in starts])


class Irreplaceable(DataLoader[Any]):
    def __init__(self) -> None:
        super().__init__(Augmented(24), 2, sampler=SubsetRandomSampler(range(24)))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


class ShardsItself(Sampler[int]):
    num_replicas, rank = 2, 0

    def __iter__(self) -> Any:
        return iter(range(12))


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0] * 24, 24),
    "replacement": lambda: RandomSampler(range(24), replacement=True, num_samples=24),
    "own generator": lambda: SubsetRandomSampler(range(24), generator=torch.Generator()),
    "random": lambda: Generated(random),
    "Random": lambda: Generated(random.Random()),
    "numpy": lambda: Generated(np.random.default_rng()),
    "RandomState": lambda: Generated(np.random.RandomState()),
    "count": ByCount,
    "set_epoch": ByEpoch,
    "in batches": lambda: BatchSampler(ByCount(), 4, False),
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_an_order_depends_on_seed_and_epoch_alone(make):
    one, later = Drawn(make()), Drawn(make())
    orders = [one.order(7, epoch).tolist() for epoch in range(4)]
    draw_all()
    assert later.order(7, 3).tolist() == orders[3] != orders[2]
    assert later.order(7, 3).tolist() == orders[3], "asked for twice, as Lightning does"


def loader(size=2, **options):
    return lambda: DataLoader(Augmented(24), size, **options)


def train(make, rank, world, position=None):
    """The batches of a rank in an epoch, and the position that counts them."""
    position = position or TrainPosition()
    batches = share(Loaders(make), rank, world, position).train_dataloader()
    return [[int(i) for i in batch[:, 0]] for batch in batches], position


def interleaved(make, world, *position):
    """The batches of all ranks, step by step."""
    ranks = [train(make, rank, world, TrainPosition(*position)) for rank in range(world)]
    return [batch for step in zip(*(r for r, _ in ranks), strict=True) for batch in step], ranks[0]


def test_a_run_resumes_at_another_world_size():
    """Two ranks, then one with the double batch, then four with half of it."""

    def samples(size, *where):
        make = lambda: loader(size, sampler=ByCount())()  # noqa: E731
        batches, (_, position) = interleaved(make, *where)
        return [i for batch in batches for i in batch], position

    order, _ = samples(2, 2, 2)
    assert sorted(order) == list(range(24))
    rest, position = samples(4, 1, 2, 8)
    assert position.per_batch == 4 and rest == order[8:]
    assert samples(1, 4, 2, 16)[0] == order[16:]
    # Custom batches are dealt out as they are.
    make = lambda: DataLoader(Augmented(24), batch_sampler=Batches())  # noqa: E731
    batches, _ = train(make, 0, 1)
    assert len(batches) == 12 and {len(batch) for batch in batches} == {1, 2, 3}
    two, (_, position) = interleaved(make, 2, 0, 4)
    assert two == batches[4:] and (position.per_batch, position.samples) == (2, None)


def test_torchs_batch_sampler_determines_the_size_and_the_order():
    data = Augmented(24)
    batches = BatchSampler(RandomSampler(data), 4, drop_last=True)
    result, position = train(lambda: DataLoader(data, batch_sampler=batches), 0, 2)
    assert {len(batch) for batch in result} == {4} and position.samples == position.per_batch == 8
    assert result != sorted(result)

    # Several loaders count together.
    position = TrainPosition()
    make = lambda: {"a": loader(2)(), "b": loader(3)()}  # noqa: E731
    share(Loaders(make), 0, 2, position).train_dataloader()
    assert position.samples == position.per_batch == 10


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (Irreplaceable, "Irreplaceable cannot be given one rank's share"),
        (lambda: DataLoader(Augmented(), sampler=iter(range(8))), "its sampler has no length"),  # type: ignore[arg-type]
        (lambda: DataLoader(Stream()), "Stream, an iterable dataset"),
    ],
)
def test_ranks_never_train_silently_on_the_same_samples(make, fragment):
    with pytest.raises(UserError, match=fragment) as error:
        share(Loaders(make), 0, 2).train_dataloader()
    assert "trainer.use_distributed_sampler=false" in str(error.value)
    made = make()
    for arguments in ({}, {"world_size": 2, "share": False}):
        assert share(Loaders(lambda: made), **arguments).train_dataloader() is made
    with pytest.warns(UserWarning, match="starts the epoch again"):
        share(Loaders(lambda: made), position=TrainPosition(0, 4)).train_dataloader()


@pytest.mark.parametrize(
    "make",
    [
        loader(sampler=DistributedSampler(range(24), num_replicas=2, rank=0)),
        loader(sampler=ShardsItself()),
        lambda: DataLoader(Augmented(24), batch_sampler=BatchSampler(ShardsItself(), 2, False)),
    ],
)
def test_a_loader_that_shards_itself_is_unchanged(make):
    made, position = make(), TrainPosition()
    source = share(Loaders(lambda: made), 0, 2, position)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert source.train_dataloader() is made is source.val_dataloader()
    assert position.samples == position.per_batch == 4


def test_another_kind_of_loader_is_unchanged_with_one_warning():
    made = iter(())
    source = Loaders(lambda: made)
    source.val_dataloader = None  # as PyTorch Geometric's does without a validation set
    assert share(source, 0, 2).val_dataloader is None
    with pytest.warns(UserWarning, match="not a DataLoader.*shard itself over 2") as seen:
        assert source.train_dataloader() is made is source.train_dataloader()
    assert len(seen) == 1


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_size": 2}, [*range(24)]),
        ({"sampler": range(5, 12), "batch_size": 2}, [*range(5, 12)]),
        ({"batch_sampler": Batches()}, sorted(i for b in Drawn(Batches()).order(0, 0) for i in b)),
    ],
    ids=["all", "sampler", "batch_sampler"],
)
def test_exact_evaluation_counts_what_a_sampler_chose(world, options, expected):
    """Each sample once, and all ranks equally often."""
    counted, lengths = [], set()
    for rank in range(world):
        make = lambda: DataLoader(Augmented(24, as_dict=True), **options)  # noqa: E731
        source = share(Loaders(make, exact=True), rank, world)
        batches = list(source.val_dataloader())
        assert all(torch.equal(b["x"][:, 0], b["index"].float()) for b in batches)
        for tested in source.test_dataloader():
            assert [b["index"].tolist() for b in tested] == [b["index"].tolist() for b in batches]
        lengths.add(len(batches))
        counted += [i for b in batches for i in b["index"][b["weight"] > 0].tolist()]
    assert sorted(counted) == expected and len(lengths) == 1
