"""Which samples come next: pure functions of (seed, epoch, samples consumed), on every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import Sampler, SequentialSampler

from distdl.util.errors import UserError
from distdl.util.seeds import stable_seed


class SampleKey(NamedTuple):
    """What a sampler hands to the dataset.

    Args:
        index: Which sample of the dataset.
        epoch: The epoch that it is drawn in; random augmentation depends on (seed, epoch, index).
        weight: 1, or 0 for a filler row that only makes the shapes of all ranks equal.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    epoch: int
    weight: float


@dataclass
class TrainPosition:
    """How far training has come, in numbers that do not depend on the world size.

    Args:
        epoch: The current epoch.
        consumed: Samples already trained on in this epoch, over all ranks (of a custom batch
            sampler: batches).
        per_batch: By how much one batch of every rank moves `consumed`, as the loader that was
            distributed says; 0 until there is one.
        samples: How many samples such batches hold, over all ranks; None: the loader does not say.
    """

    epoch: int = 0
    consumed: int = 0
    per_batch: int = 0
    samples: int | None = None


class Ordered(Protocol):
    """A dataset that may choose the order of training, such as one whose files are downloaded."""

    def order(self, seed: int, epoch: int) -> np.ndarray[Any, Any] | None:
        """Every sample once, int64 [N], a pure function; None: the usual shuffle of all."""
        ...

    def reached(self, seed: int, epoch: int, place: int, order: np.ndarray[Any, Any]) -> None:
        """Called for each batch, in the main process, before it is given to a worker.

        Args:
            seed, epoch: As for `order`.
            place: How many samples of `order` were given out before, by all ranks.
            order: All of this epoch's.
        """
        ...


class TrainBatches(Sampler[list[SampleKey]]):
    """Batches of one rank for training: full ones only, the same number on every rank.

    The order of an epoch depends on (seed, epoch) alone, or is the dataset's own. A global batch is
    the next `batch_size * world_size` samples of it, and rank r takes the r-th slice: ranks see
    disjoint samples, and any world size with the same global batch sees the same global batches.
    The tail that fills no global batch is dropped (another one in every epoch, when shuffled).

    `iter()` starts at `position` as it is at that moment and does no work for what is skipped.

    Args:
        num_samples: Length of the dataset.
        batch_size: Samples per rank and batch.
        rank: Of this process among those that take different data.
        world_size: How many of them there are.
        seed: The same on every rank.
        shuffle: False: the dataset's order, in every epoch.
        position: Where to start; the training loop keeps it up to date.
        resume: False: every `iter()` starts at the beginning of `position.epoch`.
        dataset: Asked for its order when shuffled; `reached` is called on it. None: shuffle all.
        batched: The order consists of batches, of which a rank takes every `world_size`-th:
            "samples" are batches then, and `batch_size` is 1.

    Raises:
        UserError: When there are fewer samples than one global batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        position: TrainPosition,
        resume: bool = True,
        dataset: Ordered | None = None,
        batched: bool = False,
    ) -> None:
        self.num_samples, self.batch_size, self.batched = num_samples, batch_size, batched
        self.rank, self.world_size = rank, world_size
        self.seed, self.shuffle = seed, shuffle
        self.position, self.resume, self.dataset = position, resume, dataset
        self.global_batch = batch_size * world_size
        if num_samples < self.global_batch and batched:
            what = f"{num_samples} training batches are fewer than the {world_size} ranks"
            raise UserError.at("data", what, "fewer devices, or smaller batches")
        if num_samples < self.global_batch:
            raise UserError.at(
                "data.batch_size",
                f"{num_samples} training samples are fewer than one global batch of "
                f"{batch_size} x {world_size} = {self.global_batch}",
                f"data.batch_size={max(1, num_samples // world_size)}"
                if num_samples >= world_size
                else "fewer devices, or more samples",
            )

    def __len__(self) -> int:
        """Batches of a full epoch, also when the next `iter()` starts in the middle of one."""
        return self.num_samples // self.global_batch

    def __iter__(self) -> Iterator[list[SampleKey]]:
        # Not itself a generator: the position counts as it is now, not at the first `next`, which
        # a prefetching loader may ask for later.
        consumed = self.position.consumed if self.resume else 0
        return self._batches(self.position.epoch, consumed)

    def _batches(self, epoch: int, consumed: int) -> Iterator[list[SampleKey]]:
        order = self._order(epoch)
        # A position that is no multiple of the global batch comes from a run with another one.
        remaining = len(order) // self.global_batch - math.ceil(consumed / self.global_batch)
        for step in range(remaining):
            start = consumed + step * self.global_batch + self.rank * self.batch_size
            if self.dataset is not None:
                place = consumed + step * self.global_batch
                self.dataset.reached(self.seed, epoch, place, order)
            rows = order[start : start + self.batch_size].tolist()
            yield [SampleKey(i, epoch, 1.0) for i in (rows[0] if self.batched else rows)]

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        if not self.shuffle:
            return np.arange(self.num_samples)
        order = self.dataset.order(self.seed, epoch) if self.dataset is not None else None
        if order is not None:
            return order
        generator = torch.Generator().manual_seed(stable_seed(self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator).numpy()


class EvalBatches(Sampler[list[SampleKey]]):
    """Batches of one rank for evaluation, in order: the same number and shapes on every rank.

    Ranks take turns: row i of rank r is sample `i * world_size + r`. What is left of the last rows
    is filled up, since ranks that differ in their number of batches hang FSDP and ZeRO-3.

    Args:
        num_samples: Length of the dataset; any number, also below the world size.
        batch_size: Rows per batch; less when no rank has so many samples.
        rank: Of this process among those that take different data.
        world_size: How many of them there are.
        exact: True: fillers are sample 0 with weight 0, and all batches have one shape: sums of
            weighted values count every sample exactly once. False: the first samples are repeated
            with weight 1 until the ranks are equal, and the last batch may be smaller.
        drop_last: Leave out a smaller last batch (not when exact).
        order: What a sampler chose of the dataset, [num_samples]; None: all of it.
        batched: `order` consists of batches, and `batch_size` is 1: what is true above for
            samples is true for batches, whose shapes stay as they are.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        exact: bool = True,
        drop_last: bool = False,
        order: np.ndarray[Any, Any] | None = None,
        batched: bool = False,
    ) -> None:
        self.num_samples, self.rank, self.world_size = num_samples, rank, world_size
        self.order, self.batched = order, batched
        self.exact = exact
        rows = math.ceil(num_samples / world_size)
        self.rows_per_batch = max(1, min(batch_size, rows)) if exact else batch_size
        if exact:
            rows = math.ceil(rows / self.rows_per_batch) * self.rows_per_batch
        elif drop_last:
            rows -= rows % batch_size
        self.rows = rows

    def __len__(self) -> int:
        return math.ceil(self.rows / self.rows_per_batch)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for start in range(0, self.rows, self.rows_per_batch):
            stop = min(start + self.rows_per_batch, self.rows)
            rows = [self._at(row) for row in range(start, stop)]
            if self.batched:
                rows = [(index, weight) for batch, weight in rows for index in batch]
            yield [SampleKey(index, 0, weight) for index, weight in rows]

    def _at(self, row: int) -> tuple[Any, float]:
        place, weight = row * self.world_size + self.rank, 1.0
        if place >= self.num_samples:
            place, weight = (0, 0.0) if self.exact else (place % self.num_samples, 1.0)
        return (place if self.order is None else self.order[place : place + 1].tolist()[0]), weight


class InOrder(SequentialSampler):
    """The samples of batches one by one, for a loader that makes the batches itself.

    Lightning's `overfit_batches` puts a sampler of all samples into the place of any that is no
    SequentialSampler, on every rank.
    """

    def __init__(self, batches: TrainBatches | EvalBatches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.batches)

    def __len__(self) -> int:
        return (
            self.batches.rows
            if isinstance(self.batches, EvalBatches)
            else (len(self.batches) * self.batches.batch_size)
        )
