"""Shards the loaders of any data module over the ranks, with exact resume."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from distdl.data.drawing import Drawn, samplers_of, shards_itself
from distdl.data.keyed import KeyedDataset, is_marked
from distdl.data.own_generators import OwnGenerators
from distdl.data.rebuilding import Striding, of_torch, rebuilt
from distdl.data.sampling import EvalBatches, PlacedBatches, TrainBatches, TrainPosition
from distdl.data.worker_end import EndingWithRank
from distdl.util.errors import NotRebuilt, UserError
from distdl.util.ordinals import ordinal
from distdl.util.seeds import stable_seed

log = logging.getLogger(__name__)

Loader = TypeVar("Loader")
LEAVE = "trainer.use_distributed_sampler=false"


def saves_itself(loader: object) -> bool:
    """Whether a loader saves its own state, which Lightning writes into checkpoints."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def restores_itself(source: LightningDataModule | LightningModule) -> bool:
    """Whether a data module, or a module that has loaders, restores some state of its own."""
    base = LightningModule if isinstance(source, LightningModule) else LightningDataModule
    hooks = ("load_state_dict", "on_load_checkpoint")
    return any(getattr(type(source), hook, None) is not getattr(base, hook, None) for hook in hooks)


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
            part = _Share(stage, source, rank, world_size, seed, position, shuffle, share)
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
    warned: set[str] = field(default_factory=set)
    seeded: int = 0  # loaders with a generator of their own

    def apply(self, loaders: object) -> object:
        if isinstance(loaders, CombinedLoader):
            return CombinedLoader(self.apply(loaders.iterables), loaders._mode)
        several = len(tree_leaves(loaders)) > 1
        self.seeded = 0
        if self.stage == "train":
            self.position.per_batch = 0
            self.position.samples = 0
            if several and not self._all_keep_their_place(loaders):
                again = "several loaders start the epoch again: samples repeat"
                self._say_not_exact("several loaders", again)
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
            at = (self.position.epoch, self.position.consumed)
            seed = stable_seed(self.seed, self.stage, self.seeded, *at)
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
            self._name_repeated(loader)
            return self._unchanged(loader)
        sampler = _Sampling(loader)
        if not sampler.has_length:
            return self._refuse_unsharded(loader, "its sampler has no length")
        if self.stage == "val":
            self._name_unrepeatable(loader)
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
            self._name_unrepeatable(loader)
        return made

    def _repeats_itself(self, loader: DataLoader[Any]) -> bool:
        """Whether an evaluation on one rank draws the same after a resume though its samples have
        no keys: from the generators of the process, whose states are in the checkpoint. Workers
        that stay, and a data set's own generators in this process, go on from one to the next."""
        if self.stage not in ("val", "test") or self.world_size > 1 or self._exact:
            return False
        if self.stage == "test" or is_marked(loader.dataset) or not self.position.seeds_apart:
            return True
        return not loader.persistent_workers if loader.num_workers else not _own(loader).places

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
            text = f"{count} {'batches' if sampler.batched else 'samples'} over {self.world_size} "
            self._warn(f"{text}ranks: {twice} of them are counted twice. {self._to_count_once}")
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

    @property
    def _to_count_once(self) -> str:
        name = type(self.source).__name__
        text = (
            f"To count each once, return dict samples, set exact_evaluation = True on {name} and "
        )
        return f'{text}weigh metrics by batch["weight"]'

    def _name_repeated(self, loader: DataLoader[Any]) -> None:
        """What torch's DistributedSampler repeats to give each rank as many samples."""
        for sampler in samplers_of(loader) if self.stage in ("val", "test") else ():
            if isinstance(sampler, DistributedSampler):
                count = len(sampler.dataset)  # type: ignore[arg-type]
                twice = sampler.total_size - count
                if twice > 0:
                    text = f"a DistributedSampler gives {twice} of {count} samples twice. "
                    self._warn(f"{text}{self._to_count_once}, without the sampler")

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
                self._warn(text.format(self.world_size))
            return self._unchanged(loader, "an iterable dataset" if shards is None else None)
        name = type(loader.dataset).__name__
        what = (
            f"train_dataloader: it is unknown whether {name}, an iterable dataset, gives "
            f"{self.world_size} ranks different samples"
        )
        remedy = (
            f"set shards_itself = True on {name} if it asks for the rank itself, or False to "
            f"let each rank take every {ordinal(self.world_size)} sample; or leave all "
            "loaders alone"
        )
        raise UserError.at("data", what, f"{remedy}: {LEAVE}", code="unreadable")

    def _refuse_unsharded(self, loader: DataLoader[Any], why: str) -> DataLoader[Any]:
        name = type(loader).__name__
        if self.world_size == 1 or self.stage != "train":
            return self._unchanged(loader, f"left unchanged ({name}: {why})")
        what = (
            "train_dataloader: the ranks would all train on the same samples, since "
            f"{name} cannot be given one rank's share: {why}"
        )
        remedy = f"change the loader; or shard it yourself, and leave all loaders alone: {LEAVE}"
        raise UserError.at("data", what, remedy, code="unsupported")

    def _unchanged(self, loader: Loader, why: str | None = None) -> Loader:
        """Counts a loader that is not sharded, and returns it unchanged, with its warnings."""
        if why is not None and self.world_size > 1:
            self._warn(f"{why}: it must shard itself over {self.world_size} ranks")
        if self.stage == "val":
            self._name_workers_that_stay(loader)
        if self.stage == "train":
            self._say_who_knows_the_place(loader)
            rows = _Sampling(loader).rows if isinstance(loader, DataLoader) else None
            self._count_in((rows or 1) * self.world_size, rows)
        return loader

    def _name_workers_that_stay(self, loader: object) -> None:
        if not isinstance(loader, DataLoader) or is_marked(loader.dataset) or self.rank:
            return
        if loader.persistent_workers and "workers" not in self.warned:
            self.warned.add("workers")
            text = (
                "val_dataloader: what the workers of %s draw, if they do, goes on from one "
                "validation to the next, and a resume does not repeat it: persistent_workers=False "
                "lets it"
            )
            log.info(text, type(loader).__name__)

    def _all_keep_their_place(self, loaders: object) -> bool:
        each = all(saves_itself(loader) for loader in tree_leaves(loaders))
        return each and (self.position.has_states or not self.position.consumed)

    def _say_who_knows_the_place(self, loader: object) -> None:
        """What a resume inside an epoch does with a loader that is left as it is."""
        name = type(loader).__name__
        source = type(self.source)
        if saves_itself(loader):
            self._name_unrepeatable_of_stateful(loader)
            if self.position.consumed and not self.position.has_states:
                text = f"{name} starts the epoch again: the checkpoint has no state for this rank"
                self._warn(text, topic="again")
        elif restores_itself(self.source):
            if self.position.consumed:
                text = f"{name} goes on inside the epoch as {source.__name__} lets it, with the "
                whose = "that rank 0 has saved" if self.world_size > 1 else "that it has saved"
                self._warn(f"{text}state {whose}", topic="again")
        else:
            self._say_not_exact(name, f"{name} starts the epoch again")

    def _name_unrepeatable_of_stateful(self, loader: object) -> None:
        dataset = getattr(loader, "dataset", None)
        own = OwnGenerators(dataset=dataset, collate_fn=getattr(loader, "collate_fn", None))
        own.look()
        places = [*own.places, *own.unknown]
        if places and not saves_itself(dataset) and not restores_itself(self.source):
            name = type(loader).__name__
            drawn = ", ".join(places)
            text = f"{name} goes on at its place, but a resume does not repeat what is drawn by "
            self._warn(f"{text}{drawn}: give {type(dataset).__name__} a state_dict")
        if getattr(loader, "num_workers", 0) and self.rank == 0 and "workers" not in self.warned:
            self.warned.add("workers")
            text = (
                "train_dataloader: what the workers of %s draw from the global generators of "
                "Python, NumPy and torch, if they do, is not repeated by a resume: keep a "
            )
            log.info(
                f"{text}generator in the state of %s", type(loader).__name__, type(dataset).__name__
            )

    def _say_not_exact(self, name: str, again: str) -> None:
        if self.position.consumed:
            self._warn(again, topic="again")
        elif self.rank == 0 and "first" not in self.warned:
            self.warned.add("first")
            text = (
                "train_dataloader: %s cannot be resumed exactly: inside an epoch a resume "
                "starts the epoch again, and what it draws at random is not repeated"
            )
            log.info(text, name)

    def _name_unrepeatable(self, loader: DataLoader[Any]) -> None:
        own = _own(loader)
        if own.unknown:
            text = f"a resume does not repeat what is drawn by {', '.join(own.unknown)}: keep a "
            self._warn(f"{text}generator in an attribute, or seed it by the index")

    def _count_in(self, per_batch: int, rows: int | None) -> None:
        """Adds one more loader to the size of a global batch."""
        position = self.position
        position.per_batch += per_batch
        if rows is None or position.samples is None:
            position.samples = None
        else:
            position.samples += rows * self.world_size

    def _warn(self, text: str, topic: str = "") -> None:
        """Once for each topic, which is the text itself by default: of several loaders each may
        have something to say."""
        if self.rank == 0 and (topic or text) not in self.warned:
            warnings.warn(f"{self.stage}_dataloader: {text}", stacklevel=2)
        self.warned.add(topic or text)


def _own(loader: DataLoader[Any]) -> OwnGenerators:
    """The generators that the data set of a loader and its `collate_fn` hold."""
    own = OwnGenerators(dataset=loader.dataset, collate_fn=loader.collate_fn)
    own.look()
    return own


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
