"""Loaders as people write them."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from points import COUNT, Points, Regression
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)


class Stream(IterableDataset[dict[str, Tensor]]):
    """Says that it knows nothing of ranks, so that each takes its turn."""

    shards_itself = False

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        points = Points()
        return (points[i] for i in range(len(points)))


class Counting(Sampler[int]):
    """Another order in each epoch, by a count of its own."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(COUNT, generator=generator).tolist())


class Neighbours(Sampler[list[int]]):
    """A batch sampler: what lies together stays together."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return COUNT // self.size

    def __iter__(self) -> Iterator[list[int]]:
        starts = torch.randperm(len(self)) * self.size
        return iter([list(range(start, start + self.size)) for start in starts.tolist()])


class Named(DataLoader[Any]):
    """A subclass with an argument of its own."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name


class Loaders(LightningDataModule):
    """Training data by one of the ways above."""

    def __init__(self, kind: str, batch_size: int = 4) -> None:
        super().__init__()
        self.kind, self.batch_size = kind, batch_size

    def train_dataloader(self) -> DataLoader:
        size = self.batch_size
        if self.kind == "stream":
            return DataLoader(Stream(), size)
        if self.kind == "weighted":
            weights = torch.arange(1.0, COUNT + 1)
            return DataLoader(Points(), size, sampler=WeightedRandomSampler(weights, COUNT))
        if self.kind == "counting":
            return DataLoader(Points(), size, sampler=Counting())
        if self.kind == "torchs batches":
            return DataLoader(Points(), batch_sampler=BatchSampler(Counting(), size, False))
        if self.kind == "unbatched":
            batches = BatchSampler(Counting(), size, False)
            return DataLoader(Points(), sampler=batches, batch_size=None)
        if self.kind == "batches":
            return DataLoader(Points(), batch_sampler=Neighbours(size))
        assert self.kind == "subclass"
        return Named("mine", Points(), size, shuffle=True, num_workers=1)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Points(10, seed=2), 4)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(Points(6, seed=3), 4)


class WithLoaders(Regression):
    """A module that brings its data."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Points(), self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Points(10, seed=2), 4)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(Points(6, seed=3), 4)


class TwoSets(LightningDataModule):
    """Validation and test on two sets of different length."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Points(), self.batch_size)

    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader(Points(14, seed=2), 4), DataLoader(Points(6, seed=3), 4)]

    def test_dataloader(self) -> list[DataLoader]:
        return self.val_dataloader()


class OnTwoSets(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)
