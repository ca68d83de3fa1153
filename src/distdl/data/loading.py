"""Shards the loaders of any data module over the ranks, with exact resume."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from distdl.data.drawing import Drawn, shards_itself
from distdl.data.keyed import KeyedDataset, is_marked
from distdl.data.loader_notes import LoaderNotes, own_generators, saves_itself
from distdl.data.rebuilding import Striding, of_torch, rebuilt
from distdl.data.sampling import EvalBatches, PlacedBatches, TrainBatches, TrainPosition
from distdl.data.worker_end import EndingWithRank
from distdl.util.errors import NotRebuilt, UserError
from distdl.util.ordinals import ordinal
from distdl.util.seeds import stable_seed

Loader = TypeVar("Loader")
LEAVE = "trainer.use_distributed_sampler=false"


def distribute(
    source: LightningDataModule | LightningModule,
    *,
    rank: int,
    world_size: int,
    seed: int,
    position: TrainPosition,
    shuffle: bool | None = None,
    share: bool = True,
) -> None:
    """Shards the loaders that `source.*_dataloader()` return, so that each rank gets its share.

    It splits the order of any `DataLoader` over a map-style dataset whose sampler has a length, or
    the batches of its custom batch sampler, and keeps all other settings. The order is made to
    depend on seed and epoch alone (`Drawn`). A subclass is created again with its own arguments.

    Training uses `TrainBatches`, which start at `position` and drop an incomplete last global
    batch, even with `drop_last=False`: uneven ranks hang DDP. A dataset with `groups`
    (`distdl.data.sampling.Groups`) gets its batches by group. With several training loaders, a
    resume in the middle of an epoch restarts the epoch (with a warning).

    Evaluation with `source.exact_evaluation = True` uses `EvalBatches`: every sample counts once.
    Samples must be dicts, in training too, and get "weight" and "index". A metric is
    `sum(weight * value) / sum(weight)` over all ranks. Otherwise a loader is unchanged on one rank,
    unless a resume could not repeat what it draws; on several, the first samples are repeated until
    the ranks are even, with a warning. What samples draw is the same in each validation, then.

    These are not sharded, and a resume in the middle of an epoch restarts it, with a warning:

    - One with a DistributedSampler, or with a sampler that has `num_replicas` and `rank`.
    - One with an iterable dataset that has `shards_itself = True`. With `shards_itself = False`
      each rank takes every `world_size`-th of its samples.
    - Anything that is not a DataLoader, with a warning on several ranks.

    Args:
        source: Changed in place: its four `*_dataloader` methods are wrapped on the instance.
        rank, world_size: Among the processes that take different data (pipeline stages share data).
        seed: The run's seed, the same on every rank.
        position: Shared with the callback that counts the samples trained on.
            `train_dataloader` sets how many samples a global batch holds.
        shuffle: Whether to shuffle training (`overfit_batches` needs False); None: as the loader.
        share: False: all loaders are left alone (`trainer.use_distributed_sampler=false`).

    Raises:
        UserError: From `train_dataloader`, if all ranks would train on the same samples: an
            iterable dataset without `shards_itself`, a sampler without a length, a subclass whose
            sampler cannot be replaced.
    """
    for stage in ("train", "val", "test", "predict"):
        hook = getattr(source, f"{stage}_dataloader")
        if hook is not None:  # else the data module has no such data
            notes = LoaderNotes(stage, source, rank, world_size, position)
            part = _Share(stage, source, rank, world_size, seed, position, shuffle, share, notes)
            setattr(source, f"{stage}_dataloader", _wrapped(hook, part))


def _wrapped(hook: Callable[[], object], share: _Share) -> Callable[[], object]:
    @functools.wraps(hook)  # Lightning reads `__wrapped__` to see if the user overrode the hook
    def dataloader() -> object:
        return share.apply(hook())

    return dataloader


@dataclass
class _Share:
    """Cuts the loaders of one stage down to one rank's share."""

    stage: str
    source: LightningDataModule | LightningModule
    rank: int
    world_size: int
    seed: int
    position: TrainPosition
    shuffle: bool | None
    share: bool
    notes: LoaderNotes
    seeded: int = 0  # loaders with a generator of their own

    def apply(self, loaders: object) -> object:
        if isinstance(loaders, CombinedLoader):
            return CombinedLoader(self.apply(loaders.iterables), loaders._mode)
        several = len(tree_leaves(loaders)) > 1
        self.seeded = 0
        if self.stage == "train":
            self.position.per_batch = 0
            self.position.samples = 0
            if several:
                self.notes.say_several(loaders)
        return tree_map(functools.partial(self._one, resume=not several), loaders)

    def _one(self, loader: object, resume: bool) -> object:
        if loader is None:
            return None
        made = self._shared(loader, resume)
        if isinstance(made, DataLoader):
            self._seed_apart(made)
        return made

    def _seed_apart(self, loader: DataLoader[Any]) -> None:
        """Gives a loader a generator for the seeds of its workers, the same on all ranks.

        Torch would draw them from the global generator, and of workers that stay once in a process:
        what the training draws then would depend on when it was resumed.
        """
        stays = loader.persistent_workers and self.position.seeds_apart
        if loader.generator is None and (stays or getattr(self.source, "seeds_apart", False)):
            epoch, consumed = self.position.epoch, self.position.consumed
            seed = stable_seed(self.seed, self.stage, self.seeded, epoch, consumed)
            loader.generator = torch.Generator().manual_seed(seed)
            self.seeded += 1

    def _shared(self, loader: object, resume: bool) -> object:
        if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, EndingWithRank):
            loader.worker_init_fn = EndingWithRank(loader.worker_init_fn)
        if not self.share:
            return self._unchanged(loader)
        if not isinstance(loader, DataLoader):
            why = f"left unchanged ({type(loader).__name__} is not a DataLoader)"
            return self._unchanged(loader, why)
        if isinstance(loader.dataset, IterableDataset):
            return self._stream(loader)
        if shards_itself(loader):
            self.notes.say_repeated_by_torch(loader)
            return self._unchanged(loader)
        sampler = _Sampling(loader)
        if not sampler.has_length:
            return self._refuse_unsharded(loader, "its sampler has no length")
        if self.stage == "val":
            self.notes.say_drawn_unseeded(loader)
        if self._repeats_itself(loader):
            return loader
        batches: TrainBatches | EvalBatches = (
            self._train(loader, sampler, resume)
            if self.stage == "train"
            else self._evaluate(loader, sampler)
        )
        weighted, collate_fn = self._exact, loader.collate_fn
        dataset = KeyedDataset(
            loader.dataset, self.seed, with_weight=weighted, collate_fn=collate_fn
        )
        try:
            made = rebuilt(loader, dataset, batches)
        except NotRebuilt as error:
            return self._refuse_unsharded(loader, str(error))
        if isinstance(batches, TrainBatches):
            self._count_in(batches.global_batch, sampler.rows)
            self.notes.say_drawn_unseeded(loader)
        return made

    def _repeats_itself(self, loader: DataLoader[Any]) -> bool:
        """Whether an evaluation on one rank draws the same after a resume though its samples have
        no keys: from the generators of the process, whose states are in the checkpoint. Workers
        that stay, and a data set's own generators in this process, go on from one to the next."""
        if self.stage not in ("val", "test") or self.world_size > 1 or self._exact:
            return False
        if self.stage == "test" or is_marked(loader.dataset) or not self.position.seeds_apart:
            return True
        if loader.num_workers:
            return not loader.persistent_workers
        return not own_generators(loader).places

    @property
    def _exact(self) -> bool:
        return bool(getattr(self.source, "exact_evaluation", False))

    def _train(self, loader: DataLoader[Any], sampler: _Sampling, resume: bool) -> TrainBatches:
        ordered: Any = loader.dataset if hasattr(loader.dataset, "reached") else None
        shuffle = sampler.shuffles
        if not sampler.by_torch:
            ordered = Drawn(sampler.order, always_first=self.shuffle is False)
        elif self.shuffle is not None:
            shuffle = self.shuffle
        kind = PlacedBatches if resume and saves_itself(loader) else TrainBatches
        return kind(
            len(sampler.order),
            sampler.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            shuffle=shuffle or not sampler.by_torch,
            position=self.position,
            resume=resume,
            dataset=ordered,
            batched=sampler.batched,
            groups=getattr(loader.dataset, "groups", None) if sampler.by_torch else None,
        )

    def _evaluate(self, loader: DataLoader[Any], sampler: _Sampling) -> EvalBatches:
        shuffled = sampler.shuffles and self.world_size == 1 and not self._exact
        drawn = (self.stage != "predict" and shuffled) or not sampler.by_torch
        order = Drawn(sampler.order).order(self.seed, 0) if drawn else None
        count = len(loader.dataset) if order is None else len(order)  # type: ignore[arg-type]
        if self.stage == "predict":
            order = (np.arange(count) if order is None else order)[self.position.predicted :]
            count -= self.position.predicted
        twice = -count % self.world_size
        if twice and not self._exact and self.stage != "predict":
            unit = "batches" if sampler.batched else "samples"
            self.notes.say_counted_twice(twice, count, unit)
        return EvalBatches(
            count,
            sampler.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            exact=self._exact,
            drop_last=sampler.drop_last and self.stage != "predict",
            order=order,
            batched=sampler.batched,
        )

    def _stream(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Refuses an iterable training dataset on several ranks without `shards_itself`."""
        dataset: Any = loader.dataset
        shards = getattr(dataset, "shards_itself", None)
        if shards is not None or self.world_size == 1 or self.stage != "train":
            if shards is False and self.world_size > 1:
                if not isinstance(dataset, Striding):  # the hook may return a loader twice
                    dataset = Striding(dataset, self.rank, self.world_size)
                    object.__setattr__(loader, "dataset", dataset)  # DataLoader forbids setattr
                text = (
                    "each rank reads the whole iterable dataset, and uses one sample in {0}; "
                    "fewer than {0} that are left at the end (of each worker) are not used"
                )
                self.notes.warn(text.format(self.world_size))
            return self._unchanged(loader, "an iterable dataset" if shards is None else None)
        name = type(loader.dataset).__name__
        remedy = (
            f"set shards_itself = True on {name} if it asks for the rank itself, or False to "
            f"let each rank take every {ordinal(self.world_size)} sample; or leave all "
            "loaders alone"
        )
        raise UserError.at(
            "data",
            what=(
                f"train_dataloader: it is unknown whether {name}, an iterable dataset, gives "
                f"{self.world_size} ranks different samples"
            ),
            remedy=f"{remedy}: {LEAVE}",
            code="unreadable",
        )

    def _refuse_unsharded(self, loader: DataLoader[Any], why: str) -> DataLoader[Any]:
        name = type(loader).__name__
        if self.world_size == 1 or self.stage != "train":
            return self._unchanged(loader, f"left unchanged ({name}: {why})")
        raise UserError.at(
            "data",
            what=(
                "train_dataloader: the ranks would all train on the same samples, since "
                f"{name} cannot be given one rank's share: {why}"
            ),
            remedy=f"change the loader; or shard it yourself, and leave all loaders alone: {LEAVE}",
            code="unsupported",
        )

    def _unchanged(self, loader: Loader, why: str | None = None) -> Loader:
        """Counts a loader that is not sharded, and returns it unchanged, with its warnings."""
        if why is not None and self.world_size > 1:
            self.notes.warn(f"{why}: it must shard itself over {self.world_size} ranks")
        if self.stage == "val":
            self.notes.say_workers_stay(loader)
        if self.stage == "train":
            self.notes.say_where_it_resumes(loader)
            rows = _Sampling(loader).rows if isinstance(loader, DataLoader) else None
            self._count_in((rows or 1) * self.world_size, rows)
        return loader

    def _count_in(self, per_batch: int, rows: int | None) -> None:
        """Adds one more loader to the size of a global batch."""
        position = self.position
        position.per_batch += per_batch
        if rows is None or position.samples is None:
            position.samples = None
        else:
            position.samples += rows * self.world_size


class _Sampling:
    """The sampler of a loader, and its batches.

    `order` is the sampler, or a custom batch sampler (then `batched` is True). `rows` is the number
    of samples in a batch, None if unknown. `by_torch` is True if torch's own sampler gives all
    samples of the dataset, in order or shuffled (`shuffles`).
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        batches, dataset = loader.batch_sampler, loader.dataset
        order: Any = loader.sampler if batches is None else batches
        rows = getattr(order, "batch_size", None)
        self.rows = rows if isinstance(rows, int) else None
        self.batched = batches is not None
        self.batch_size = 1
        self.drop_last = False
        if isinstance(batches, BatchSampler) and of_torch(batches):
            # If it was an argument, loader.sampler is unused.
            self.batched = False
            order = batches.sampler
            self.batch_size = batches.batch_size
            self.drop_last = batches.drop_last
        self.order = order
        draws = self.shuffles = type(order).__name__ == RandomSampler.__name__
        self.by_torch = (
            (draws or type(order) is SequentialSampler)
            and of_torch(order)
            and order.data_source is dataset
            and not (draws and order.replacement)
            and (not draws or order.num_samples == len(dataset))
        )

    @property
    def has_length(self) -> bool:
        try:
            return len(self.order) >= 0
        except (TypeError, NotImplementedError):
            return False
