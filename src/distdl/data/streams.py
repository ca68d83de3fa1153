"""Splits an iterable dataset that does not shard itself over the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


class Striding(IterableDataset[Any]):
    """Every `world_size`-th sample of another dataset, starting at the `rank`-th.

    A last incomplete round is dropped, so that all ranks get the same number of samples. Each
    worker process does this with the samples that the dataset gives there.

    Args:
        dataset: Gives the same samples on every rank.
    """

    def __init__(self, dataset: IterableDataset[Any], rank: int, world_size: int) -> None:
        self.dataset, self.rank, self.world_size = dataset, rank, world_size

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        while len(row := list(itertools.islice(samples, self.world_size))) == self.world_size:
            yield row[self.rank]

    def __len__(self) -> int:
        return len(self.dataset) // self.world_size  # type: ignore[arg-type]  # TypeError: unknown

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # unset while unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)
