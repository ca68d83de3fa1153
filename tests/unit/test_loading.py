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
from tests.unit.test_data import Augmented, Loaders, share


class Generated(Sampler[Any]):
    """Draws from a generator of its own, or from one that everybody shares."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        return (np.int64(round(self.generator.random() * 23)) for _ in range(24))


class ByCount(Sampler[int]):
    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        self.count += 1
        return iter(
            torch.randperm(24, generator=torch.Generator().manual_seed(self.count)).tolist()
        )


class Batches(Sampler[list[int]]):
    """Of 1, 2, 3 samples in turn, in another order in each epoch."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        starts = torch.randperm(12).tolist()
        return iter([[2 * s + k % 2 for k in range(1 + s % 3)] for s in starts])


class Fixed(DataLoader[Any]):
    """Its sampler cannot be replaced."""

    def __init__(self) -> None:
        super().__init__(Augmented(24), 2, sampler=SubsetRandomSampler(range(24)))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0] * 24, 24),
    "replacement": lambda: RandomSampler(range(24), replacement=True, num_samples=24),
    "own generator": lambda: SubsetRandomSampler(range(24), generator=torch.Generator()),
    "random": lambda: Generated(random),
    "Random": lambda: Generated(random.Random()),
    "numpy": lambda: Generated(np.random.default_rng()),
    "RandomState": lambda: Generated(np.random.RandomState()),
    "count": ByCount,
    "in batches": lambda: BatchSampler(ByCount(), 4, False),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_depends_on_seed_and_epoch_alone(name):
    make = SAMPLERS[name]
    one, later = Drawn(make()), Drawn(make())
    orders = [one.order(7, epoch).tolist() for epoch in range(4)]
    random.random(), np.random.rand(), torch.rand(3)
    assert later.order(7, 3).tolist() == orders[3] != orders[2]
    assert later.order(7, 3).tolist() == orders[3], "asked for twice, as Lightning does"


def train(make, rank, world, position=None, epoch=0):
    position = position or TrainPosition(epoch)
    source = share(Loaders(make), rank, world, position)
    return [[int(i) for i in batch[:, 0]] for batch in source.train_dataloader()], position


def interleaved(ranks):
    return [batch for step in zip(*ranks, strict=True) for batch in step]


def test_a_run_goes_on_at_another_world_size():
    """Two ranks, then one with the double batch, then four with half of it."""
    make = lambda size: lambda: DataLoader(Augmented(24), size, sampler=ByCount())  # noqa: E731
    whole = [
        i
        for batch in interleaved([train(make(2), r, 2, epoch=2)[0] for r in (0, 1)])
        for i in batch
    ]
    assert sorted(whole) == list(range(24))
    alone, position = train(make(4), 0, 1, TrainPosition(2, 8))
    assert position.per_batch == 4 and [i for batch in alone for i in batch] == whole[8:]
    four = interleaved([train(make(1), r, 4, TrainPosition(2, 16))[0] for r in range(4)])
    assert [i for batch in four for i in batch] == whole[16:]


def test_batches_of_ones_own_are_dealt_out_and_go_on_at_another_world_size():
    make = lambda: DataLoader(Augmented(24), batch_sampler=Batches())  # noqa: E731
    whole = train(make, 0, 1)[0]
    assert len(whole) == 12 and {len(batch) for batch in whole} == {1, 2, 3}
    two = [train(make, rank, 2, TrainPosition(0, 4)) for rank in (0, 1)]
    assert interleaved([batches for batches, _ in two]) == whole[4:]
    assert two[0][1].per_batch == 2 and two[0][1].samples is None


def test_torchs_batch_sampler_says_the_size_and_the_order():
    def make():
        batches = BatchSampler(RandomSampler(data), 4, drop_last=True)
        return DataLoader(data, batch_sampler=batches)

    data = Augmented(24)
    found, position = train(make, 0, 2)
    assert {len(batch) for batch in found} == {4} and position.samples == position.per_batch == 8
    assert found != sorted(found)


def test_several_loaders_count_together():
    make = lambda: {"a": DataLoader(Augmented(24), 2), "b": DataLoader(Augmented(24), 3)}  # noqa: E731
    position = TrainPosition()
    share(Loaders(make), 0, 2, position).train_dataloader()
    assert position.samples == position.per_batch == 10


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Fixed, "Fixed cannot be given one rank's share"),
        (lambda: DataLoader(Augmented(), sampler=iter(range(8))), "its sampler has no length"),  # type: ignore[arg-type]
        (lambda: DataLoader(Stream()), "Stream, an iterable dataset"),
    ],
)
def test_ranks_never_train_on_the_same_in_silence(make, words):
    with pytest.raises(UserError, match=words) as refused:
        share(Loaders(make), 0, 2).train_dataloader()
    assert "trainer.use_distributed_sampler=false" in str(refused.value)
    given = make()
    for alone in (
        share(Loaders(lambda: given)),
        share(Loaders(lambda: given), 0, 2, share=False),
    ):
        assert alone.train_dataloader() is given
    with pytest.warns(UserWarning, match="starts the epoch anew"):
        share(Loaders(lambda: given), position=TrainPosition(0, 4)).train_dataloader()


class ShardsItself(Sampler[int]):
    num_replicas, rank = 2, 0

    def __iter__(self) -> Any:
        return iter(range(12))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(
            Augmented(24), 2, sampler=DistributedSampler(range(24), num_replicas=2, rank=0)
        ),
        lambda: DataLoader(Augmented(24), 2, sampler=ShardsItself()),
        lambda: DataLoader(Augmented(24), batch_sampler=BatchSampler(ShardsItself(), 2, False)),
    ],
)
def test_what_shards_itself_is_left_alone(make):
    given, position = make(), TrainPosition()
    source = share(Loaders(lambda: given), 0, 2, position)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert source.train_dataloader() is given is source.val_dataloader()
    assert position.samples == position.per_batch == 4


def test_a_stage_that_a_data_module_has_set_to_none_is_absent():
    data = Loaders(lambda: DataLoader(range(4)))
    data.val_dataloader = None  # as PyTorch Geometric's does without a validation set
    assert share(data).val_dataloader is None
    assert len(data.train_dataloader()) == 4


def test_a_foreign_loader_is_left_alone_with_one_warning():
    given = iter(())
    source = share(Loaders(lambda: given), 0, 2)
    with pytest.warns(UserWarning, match="no DataLoader.*shard by itself over 2 ranks") as seen:
        assert source.train_dataloader() is given is source.train_dataloader()
    assert len(seen) == 1


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("sampler", ["sampler", "batch_sampler"])
def test_exact_evaluation_counts_what_a_sampler_chose(world, sampler):
    """Some of the samples, or batches of one's own: each once, and all ranks equally often."""
    counted, lengths = [], set()
    chosen = {"sampler": range(5, 12)} if sampler == "sampler" else {"batch_sampler": Batches()}
    size = {"batch_size": 2} if sampler == "sampler" else {}
    for rank in range(world):
        make = lambda: DataLoader(Augmented(24, as_dict=True), **chosen, **size)  # noqa: E731
        source = share(Loaders(make, exact=True), rank, world)
        batches = list(source.val_dataloader())
        for tested in source.test_dataloader():
            assert [b["index"].tolist() for b in tested] == [b["index"].tolist() for b in batches]
        lengths.add(len(batches))
        counted += [i for b in batches for i in b["index"][b["weight"] > 0].tolist()]
    expected = list(range(5, 12))
    if sampler == "batch_sampler":
        expected = sorted(i for batch in Drawn(Batches()).order(0, 0) for i in batch)
    assert sorted(counted) == expected and len(lengths) == 1
