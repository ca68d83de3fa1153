"""Shards any user's data over the ranks, with exact resume, without a change to their code."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

from distdl.data.drawing import Drawn, random_states_kept, seed_all, shards_itself
from distdl.data.rebuilding import NotRebuilt, rebuilt
from distdl.data.sampling import EvalBatches, SampleKey, TrainBatches, TrainPosition
from distdl.data.streams import Striding
from distdl.data.worker_signals import Surviving
from distdl.util.errors import UserError
from distdl.util.seeds import stable_seed


class KeyedDataset(Dataset[Any]):
    """A map-style dataset whose random augmentation depends only on (seed, epoch, index).

    Before `dataset[index]` it seeds Python's `random`, NumPy's global generator and torch's default
    CPU generator, so a sample is the same in any worker, on any rank and after a resume. In the
    main process (`num_workers=0`) it then restores their states. This costs about 10 us per sample
    and 80 us per batch; a dataset that draws nothing avoids it with `is_deterministic = True`.
    torch's own TensorDataset counts as deterministic.

    Other attributes are looked up on the wrapped dataset. A plain integer key gives
    `dataset[index]`. If the dataset has a method `at_epoch(index, epoch)`, it is called instead,
    so that a sample may depend on the epoch (`data.resize`).

    Args:
        dataset: With `__getitem__` and `__len__`.
        seed: The run's seed.
        with_weight: Add "weight" (float32, 1 or 0) and "index" (int64) to each sample.

    Raises:
        UserError: With `with_weight`, when a sample is not a dict.
    """

    def __init__(self, dataset: Any, seed: int, *, with_weight: bool = False) -> None:
        self.dataset, self.seed, self.with_weight = dataset, seed, with_weight

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # unset while unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, key: SampleKey | int) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[SampleKey | int]) -> list[Any]:
        # DataLoader's fetcher calls this per batch, so the states are saved once per batch.
        if getattr(self.dataset, "is_deterministic", isinstance(self.dataset, TensorDataset)):
            return [self._sample(key) for key in keys]
        if get_worker_info() is not None:  # nothing else in a worker draws
            return [self._sample(key, reseed=True) for key in keys]
        with random_states_kept():
            return [self._sample(key, reseed=True) for key in keys]

    def _sample(self, key: SampleKey | int, reseed: bool = False) -> Any:
        if not isinstance(key, SampleKey):
            return self.dataset[key]
        if reseed:
            seed_all(stable_seed(self.seed, key.epoch, key.index))
        at_epoch = getattr(self.dataset, "at_epoch", None)
        sample = at_epoch(key.index, key.epoch) if at_epoch else self.dataset[key.index]
        if not self.with_weight:
            return sample
        if not isinstance(sample, dict):
            raise UserError(
                "exact_evaluation = True needs samples that are dicts, to carry weight and index; "
                f"{type(self.dataset).__name__} gave {type(sample).__name__}"
            )
        # A NumPy scalar, since default_collate turns Python floats into float64. A sample may have
        # a weight of 0 itself (a damaged image that was replaced by another one).
        weight = np.float32(key.weight * sample.get("weight", 1.0))
        return {**sample, "weight": weight, "index": key.index}


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

    It shards any `DataLoader` over a map-style dataset and keeps all its other settings:

    - With torch's own sampler (`shuffle=True` or not) or any other that has a length: its order is
      split over the ranks. That order is made to depend on seed and epoch alone (`Drawn`).
    - With a custom batch sampler: its batches are split over the ranks.
    - A subclass is created again with its own arguments, as Lightning does it.

    Training uses `TrainBatches`, which start at `position`. The tail that fills no global batch is
    dropped in each epoch, even with `drop_last=False`: uneven ranks hang DDP. If `train_dataloader`
    returns several loaders, each is sharded, but a resume in the middle of an epoch restarts the
    epoch (with a warning).

    Evaluation with `source.exact_evaluation = True` uses `EvalBatches`: every sample counts once.
    Samples must be dicts, in training too, and get "weight" and "index". A metric is
    `sum(weight * value) / sum(weight)`, with both sums taken over all ranks. Otherwise a loader is
    unchanged on one rank; on several, the first samples are repeated until the ranks are even, with
    a warning that says how many count twice.

    These loaders are not sharded, and a resume in the middle of an epoch restarts the epoch, with a
    warning:

    - One with a DistributedSampler, or with a sampler that has `num_replicas` and `rank`.
    - One with an iterable dataset that has `shards_itself = True`. With `shards_itself = False`
      each rank takes every `world_size`-th of its samples.
    - Anything that is not a DataLoader, with a warning on several ranks.

    Args:
        source: Changed in place: its four `*_dataloader` methods are wrapped on the instance.
        rank: Rank among the processes that take different data (pipeline stages share theirs).
        world_size: Number of these processes.
        seed: The run's seed, the same on every rank.
        position: Shared with the callback that counts the samples trained on.
            `train_dataloader` sets how many samples a global batch holds.
        shuffle: Whether to shuffle training; None: as the loader says. `overfit_batches` needs
            False.
        share: False: all loaders are left alone (`trainer.use_distributed_sampler=false`).

    Raises:
        UserError: From `train_dataloader`, on several ranks, if all of them would train on the
            same samples: an iterable dataset without `shards_itself`, a sampler without a length,
            a subclass whose sampler cannot be replaced.
    """
    for stage in ("train", "val", "test", "predict"):
        hook = getattr(source, f"{stage}_dataloader")
        if hook is None:  # the data module has no such data
            continue
        part = _Share(stage, source, rank, world_size, seed, position, shuffle, share)
        setattr(source, f"{stage}_dataloader", _wrapped(hook, part))


def _wrapped(hook: Callable[[], Any], share: _Share) -> Callable[[], Any]:
    @functools.wraps(hook)  # Lightning reads `__wrapped__` to see if the user overrode the hook
    def dataloader() -> Any:
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

    def apply(self, loaders: Any) -> Any:
        several = _count(loaders) > 1
        if self.stage == "train":
            self.position.per_batch, self.position.samples = 0, 0
            if several and self.position.consumed:
                self._warn("several", "several loaders start the epoch anew, samples repeat")
        return self._each(loaders, resume=not several)

    def _each(self, loaders: Any, resume: bool) -> Any:
        if isinstance(loaders, CombinedLoader):
            return CombinedLoader(self._each(loaders.iterables, resume), loaders._mode)
        if isinstance(loaders, Mapping):
            return {name: self._each(loader, resume) for name, loader in loaders.items()}
        if isinstance(loaders, list | tuple):
            each = [self._each(loader, resume) for loader in loaders]
            if isinstance(loaders, list):
                return each
            return type(loaders)(*each) if hasattr(loaders, "_fields") else tuple(each)
        return self._one(loaders, resume)

    def _one(self, loader: Any, resume: bool) -> Any:
        if loader is None:
            return None
        if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, Surviving):
            loader.worker_init_fn = Surviving(loader.worker_init_fn)
        if not self.share:
            return self._left(loader)
        if not isinstance(loader, DataLoader):
            name = type(loader).__name__
            return self._left(loader, f"left as it is ({name} is not a DataLoader)")
        if isinstance(loader.dataset, IterableDataset):
            return self._stream(loader)
        if shards_itself(loader):
            return self._left(loader)
        sampler = _Chosen(loader)
        if not sampler.has_length:
            return self._cannot(loader, "its sampler has no length")
        if self.stage == "train":
            batches: TrainBatches | EvalBatches | None = self._train(loader, sampler, resume)
        else:
            batches = self._evaluate(loader, sampler)
        if batches is None:
            return loader
        try:
            made = rebuilt(loader, self._keyed(loader), batches)
        except NotRebuilt as error:
            return self._cannot(loader, str(error))
        if isinstance(batches, TrainBatches):
            self._count_in(batches.global_batch, sampler.rows)
        return made

    @property
    def _exact(self) -> bool:
        return bool(getattr(self.source, "exact_evaluation", False))

    def _keyed(self, loader: DataLoader[Any]) -> KeyedDataset:
        return KeyedDataset(loader.dataset, self.seed, with_weight=self._exact)

    def _train(self, loader: DataLoader[Any], sampler: _Chosen, resume: bool) -> TrainBatches:
        ordered: Any = loader.dataset if hasattr(loader.dataset, "reached") else None
        shuffle = isinstance(sampler.order, RandomSampler)
        if not sampler.by_torch:
            ordered = Drawn(sampler.order, always_first=self.shuffle is False)
        elif self.shuffle is not None:
            shuffle = self.shuffle
        return TrainBatches(
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
        )

    def _evaluate(self, loader: DataLoader[Any], sampler: _Chosen) -> EvalBatches | None:
        if self.world_size == 1 and not self._exact:
            return None
        order = None if sampler.by_torch else Drawn(sampler.order).order(self.seed, 0)
        count = len(loader.dataset) if order is None else len(order)  # type: ignore[arg-type]
        twice = -count % self.world_size
        if twice and not self._exact:
            self._warn(
                "twice",
                f"{count} {'batches' if sampler.batched else 'samples'} over {self.world_size} "
                f"ranks: {twice} of them are counted "
                "twice. To count each once, return dict samples, set exact_evaluation = True on "
                f'{type(self.source).__name__} and weigh metrics by batch["weight"]',
            )
        return EvalBatches(
            count,
            sampler.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            exact=self._exact,
            drop_last=sampler.drop_last,
            order=order,
            batched=sampler.batched,
        )

    def _stream(self, loader: DataLoader[Any]) -> Any:
        """Refuses an iterable training dataset on several ranks without `shards_itself`."""
        says = getattr(loader.dataset, "shards_itself", None)
        if says is not None or self.world_size == 1 or self.stage != "train":
            if says is False and self.world_size > 1:
                if not isinstance(loader.dataset, Striding):  # the hook may return a loader twice
                    assert isinstance(loader.dataset, IterableDataset)
                    dataset = Striding(loader.dataset, self.rank, self.world_size)
                    object.__setattr__(loader, "dataset", dataset)  # DataLoader forbids setattr
                text = "each rank takes one sample of %d of the iterable dataset, and reads all"
                self._warn("stride", text % self.world_size)
            return self._left(loader, "an iterable dataset" if says is None else None)
        name = type(loader.dataset).__name__
        raise UserError.at(
            "data",
            f"train_dataloader: nothing says whether {name}, an iterable dataset, gives "
            f"{self.world_size} ranks different samples",
            f"set shards_itself = True on {name} if it asks for the rank itself, or False to "
            f"let each rank take every {self.world_size}th sample; or leave all loaders alone: "
            "trainer.use_distributed_sampler=false",
        )

    def _cannot(self, loader: DataLoader[Any], why: str) -> Any:
        name = type(loader).__name__
        if self.world_size == 1 or self.stage != "train":
            return self._left(loader, f"left as it is ({name}: {why})")
        raise UserError.at(
            "data",
            f"train_dataloader: the ranks would all train on the same samples, since {name} "
            f"cannot be given one rank's share: {why}",
            "change that, or shard by yourself and leave all loaders alone: "
            "trainer.use_distributed_sampler=false",
        )

    def _left(self, loader: Any, why: str | None = None) -> Any:
        """Counts a loader that is not sharded, and returns it unchanged.

        On several ranks it warns with `why`, if given. On a resume it warns that the loader starts
        from the epoch's beginning.
        """
        if why is not None and self.world_size > 1:
            sharded = f"it must shard by itself over {self.world_size} ranks"
            self._warn("custom", f"{why}: {sharded}")
        if self.stage == "train":
            if self.position.consumed:
                self._warn("anew", f"{type(loader).__name__} starts the epoch anew")
            rows = _Chosen(loader).rows if isinstance(loader, DataLoader) else None
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

    def _warn(self, topic: str, text: str) -> None:
        if self.rank == 0 and topic not in self.warned:
            warnings.warn(f"{self.stage}_dataloader: {text}", stacklevel=2)
        self.warned.add(topic)


class _Chosen:
    """What chooses a loader's samples, and how many of them a batch holds.

    `order` is the sampler, or a custom batch sampler (then `batched` is True). `rows` is the number
    of samples in a batch, None if unknown.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        batches = loader.batch_sampler
        self.batched = batches is not None and type(batches) is not BatchSampler
        # With torch's BatchSampler as argument, loader.sampler is unused and batch_size is None.
        self.order: Any = loader.sampler if batches is None else batches
        if type(batches) is BatchSampler:
            self.order = batches.sampler
        self.batch_size = batches.batch_size if type(batches) is BatchSampler else 1
        rows = getattr(batches if batches is not None else loader.sampler, "batch_size", None)
        self.rows = rows if isinstance(rows, int) else None
        self.drop_last = bool(type(batches) is BatchSampler and batches.drop_last)
        self.by_torch = _is_torchs_choice(self.order, loader.dataset)

    @property
    def has_length(self) -> bool:
        try:
            return len(self.order) >= 0
        except (TypeError, NotImplementedError):
            return False


def _is_torchs_choice(sampler: Any, dataset: Any) -> bool:
    """Whether torch's own sampler gives all samples of the dataset, in order or shuffled."""
    if type(sampler) is SequentialSampler:
        return sampler.data_source is dataset
    if type(sampler) is not RandomSampler or sampler.replacement:
        return False
    return sampler.data_source is dataset and sampler.num_samples == len(dataset)


def _count(loaders: Any) -> int:
    if isinstance(loaders, CombinedLoader):
        return _count(loaders.iterables)
    if isinstance(loaders, Mapping):
        return sum(map(_count, loaders.values()))
    return sum(map(_count, loaders)) if isinstance(loaders, list | tuple) else 1
