"""Iterable datasets that do not know of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


class Striding(IterableDataset[Any]):
    """Every `world_size`-th sample of another dataset, from the `rank`-th on.

    The last samples that are not enough for all ranks are left out, so that all ranks get equally
    many. In each worker process the same, of what the dataset gives there.

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
        if name.startswith("__") or name == "dataset":  # while unpickling nothing is there yet
            raise AttributeError(name)
        return getattr(self.dataset, name)
