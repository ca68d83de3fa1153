"""Which samples come next on each rank: a pure function of (seed, epoch, samples consumed)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import Sampler, SequentialSampler

from distdl.datasets.order import by_group
from distdl.util.errors import UserError
from distdl.util.seeds import stable_seed


class SampleKey(NamedTuple):
    """The key that a sampler passes to the dataset."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    epoch: int
    weight: float  # 1, or 0 for a filler row that only makes the shapes of all ranks equal


@dataclass
class TrainPosition:
    """How far training has come, in numbers that do not depend on the world size.

    Args:
        consumed: Samples (with a custom batch sampler: batches) already trained on in this epoch,
            over all ranks.
        per_batch: How much one step (a batch on every rank) adds to `consumed`; 0 until a loader
            is distributed.
        samples: Samples of one step, over all ranks; None: unknown.
        predicted: Samples, over all ranks, for which an interrupted prediction has stored rows.
        has_states: The checkpoint has this rank's states of the loaders that save their own.
        seeds_apart: Loaders whose workers stay draw seeds for them from generators of their own.
            False: from the training's, as in the runs of checkpoints that do not have this word.
        sizes: Global batches of this epoch, where they are made by group: from which sample on they
            had how many samples. One pair, unless a resume has changed the size.
    """

    epoch: int = 0
    consumed: int = 0
    per_batch: int = 0
    samples: int | None = None
    predicted: int = 0
    has_states: bool = False
    seeds_apart: bool = True
    sizes: list[tuple[int, int]] = field(default_factory=list)


class Ordered(Protocol):
    """A dataset that may choose the order of training, for example to limit downloads."""

    def order(self, seed: int, epoch: int) -> np.ndarray[Any, Any] | None:
        """Every sample once, int64 [N], as a pure function; None: a plain shuffle of all."""
        ...

    def reached(self, seed: int, epoch: int, start: int, order: np.ndarray[Any, Any]) -> None:
        """Called for each batch, in the main process, before the batch goes to a worker.

        Args:
            start: Number of samples of the epoch's `order` that all ranks received before.
        """
        ...


@dataclass(frozen=True)
class Groups:
    """Samples that go into batches by group, such as images by their shape.

    Args:
        of_sample: The group of each sample, a number from 0, [N].
        ends: Returns where the windows of an epoch's order end (`order.by_group`); None: it has
            none. Takes seed and epoch.
    """

    of_sample: np.ndarray[Any, Any]
    ends: Callable[[int, int], Sequence[int]] | None = None


class TrainBatches(Sampler[list[SampleKey]]):
    """Training batches of one rank: only full ones, and the same number on every rank.

    The order of an epoch depends on (seed, epoch) alone, or comes from the dataset. A global batch
    is the next `batch_size * world_size` samples, and rank r takes the r-th slice: with the same
    global batch size any world size sees the same batches. An incomplete last batch is dropped.

    With `groups` a global batch is of one group. Their order then depends on the global batch size,
    too: after a resume with another one, the samples that are left are grouped again.

    `iter()` reads `position` when it is called, and does no work for the samples that it skips.

    Args:
        num_samples: Length of the dataset.
        batch_size: Samples per rank and batch.
        rank, world_size: Counted among the processes that take different data.
        seed: The same on every rank.
        shuffle: False: every epoch has the dataset's order.
        position: Where to start; the training loop updates it.
        resume: False: every `iter()` starts at the beginning of `position.epoch`.
        dataset: Gives the order if `shuffle` is True; its `reached` is called. None: shuffle all.
        batched: The items of the order are batches, and each rank takes every `world_size`-th.
            "Samples" above then means batches, and `batch_size` is 1.
        groups: Shuffled samples are put into batches by these; None: as they come.

    Raises:
        UserError: If there are fewer samples than one global batch.
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
        groups: Groups | None = None,
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.batched = batched
        self.groups = groups if shuffle else None
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.position = position
        self.resume = resume
        self.dataset = dataset
        self.global_batch = batch_size * world_size
        self._current: np.ndarray[Any, Any] | None = None  # the order of the epoch
        if num_samples >= self.global_batch:
            return
        if batched:
            raise UserError.at(
                "data",
                what=f"{num_samples} training batches are fewer than the {world_size} ranks",
                remedy="fewer devices, or smaller batches",
                code="not-enough",
            )
        smaller = num_samples // world_size
        raise UserError.at(
            "data.batch_size",
            what=(
                f"{num_samples} training samples are fewer than one global batch of "
                f"{batch_size} x {world_size} = {self.global_batch}"
            ),
            remedy=f"data.batch_size={smaller}" if smaller else "fewer devices, or more samples",
            code="not-enough",
        )

    def __len__(self) -> int:
        """Batches of a full epoch, even if the next `iter()` starts in the middle of one."""
        return self.num_samples // self.global_batch

    def __iter__(self) -> Iterator[list[SampleKey]]:
        # Not a generator: it must read the position now, and not at a loader's first `next`.
        consumed = self.position.consumed if self.resume else 0
        return self._batches(self.position.epoch, consumed)

    def _batches(self, epoch: int, consumed: int) -> Iterator[list[SampleKey]]:
        self._current = order = self._grouped(self._order(epoch), epoch, consumed)
        # After a resume with another global batch, `consumed` may not be a multiple of it.
        remaining = len(order) // self.global_batch - math.ceil(consumed / self.global_batch)
        stop = consumed + remaining * self.global_batch
        for start in range(consumed, stop, self.global_batch):
            if self.dataset is not None:
                self.dataset.reached(self.seed, epoch, start, order)
            first = start + self.rank * self.batch_size
            rows = order[first : first + self.batch_size].tolist()
            yield [SampleKey(i, epoch, 1.0) for i in (rows[0] if self.batched else rows)]

    def current(self) -> list[Any]:
        """The samples of this rank's batch at `position`, the one that is trained on."""
        if self._current is None:
            return []
        first = self.position.consumed + self.rank * self.batch_size
        rows = self._current[first : first + self.batch_size].tolist()
        return list(rows[0]) if self.batched and rows else rows

    def _grouped(
        self, order: np.ndarray[Any, Any], epoch: int, consumed: int
    ) -> np.ndarray[Any, Any]:
        """The order by groups; notes the size of its batches in `position`."""
        if self.groups is None:
            return order
        # One that begins here has not made a batch.
        sizes = [(start, size) for start, size in self.position.sizes if start < consumed]
        if not sizes:
            sizes.append((0, self.global_batch))
        elif sizes[-1][1] != self.global_batch:
            sizes.append((consumed, self.global_batch))
        self.position.sizes = sizes
        ends = self.groups.ends(self.seed, epoch) if self.groups.ends else ()
        for start, size in sizes:
            left = [end - start for end in ends if end > start]
            regrouped = by_group(order[start:], self.groups.of_sample, size, left)
            order = np.concatenate([order[:start], regrouped])
        return order

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        if not self.shuffle:
            return np.arange(self.num_samples)
        order = self.dataset.order(self.seed, epoch) if self.dataset is not None else None
        if order is not None:
            return order
        generator = torch.Generator().manual_seed(stable_seed(self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator).numpy()


class RecentBatches(TrainBatches):
    """The batches that a rank was trained on last, in this epoch; at its start, the first ones.

    Args:
        of: Gives their order; its position stays as it is, and its dataset is told nothing.
        most: At most so many.
    """

    def __init__(self, of: TrainBatches, most: int) -> None:
        first = max(0, of.position.consumed - most * of.global_batch)
        super().__init__(
            of.num_samples,
            of.batch_size,
            rank=of.rank,
            world_size=of.world_size,
            seed=of.seed,
            shuffle=of.shuffle,
            position=replace(of.position, consumed=first, sizes=[*of.position.sizes]),
            dataset=None if of.dataset is None else _OrderAlone(of.dataset),
            batched=of.batched,
            groups=of.groups,
        )
        self.most = most

    def __len__(self) -> int:
        return min(self.most, super().__len__())

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return itertools.islice(super().__iter__(), self.most)


class _OrderAlone:
    """An `Ordered` that does not tell the dataset what was reached."""

    def __init__(self, dataset: Ordered) -> None:
        self.order = dataset.order

    def reached(self, seed: int, epoch: int, start: int, order: np.ndarray[Any, Any]) -> None:
        pass


class EvalBatches(Sampler[list[SampleKey]]):
    """Evaluation batches of one rank, in order: the same number and shapes on every rank.

    Row i of rank r is sample `i * world_size + r`. The last rows are filled up, since FSDP and
    ZeRO-3 hang if ranks have different numbers of batches.

    Args:
        num_samples: Length of the dataset; may be below the world size.
        batch_size: Rows per batch; reduced (if exact) to the number of rows of a rank.
        rank, world_size: Counted among the processes that take different data.
        exact: True: fillers are sample 0 with weight 0, and all batches have one shape, so sums of
            weighted values count every sample exactly once. False: the first samples are repeated
            with weight 1 until the ranks are equal, and the last batch may be smaller.
        drop_last: Leave out a smaller last batch (ignored if exact).
        order: Indices that a sampler chose, [num_samples]; None: all, in order.
        batched: As for `TrainBatches`; the shapes of batches do not change.
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
        self.num_samples = num_samples
        self.rank = rank
        self.world_size = world_size
        self.order = order
        self.batched = batched
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
        index = row * self.world_size + self.rank
        weight = 1.0
        if index >= self.num_samples:
            index, weight = (0, 0.0) if self.exact else (index % self.num_samples, 1.0)
        return (index if self.order is None else self.order[index : index + 1].tolist()[0]), weight


class InOrder(SequentialSampler):
    """The samples of the batches one by one, for a loader that makes its own batches.

    It is a SequentialSampler, since `overfit_batches` replaces any other by one of all samples.
    """

    def __init__(self, batches: TrainBatches | EvalBatches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.batches)

    def __len__(self) -> int:
        if isinstance(self.batches, EvalBatches):
            return self.batches.rows
        return len(self.batches) * self.batches.batch_size


class Placed:
    """For a loader that saves its own state (torchdata's `StatefulDataLoader`). It would skip what
    an epoch has consumed once more, if its sampler did not seem to know the place: these start at
    their `TrainPosition`, at any number of ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: object) -> None:
        pass


class PlacedBatches(Placed, TrainBatches):
    pass


class PlacedInOrder(Placed, InOrder):
    pass
