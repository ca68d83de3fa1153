"""Any user's data, sharded over the ranks and exact on resume, without a change to their code."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
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

from distdl.data.sampling import EvalBatches, SampleKey, TrainBatches, TrainPosition, stable_seed
from distdl.data.worker_signals import Surviving
from distdl.errors import UserError


class KeyedDataset(Dataset[Any]):
    """A map-style dataset whose random augmentation depends on (seed, epoch, index) and no more.

    Before `dataset[index]` it seeds Python's `random`, NumPy's global generator and torch's default
    CPU generator, so a sample comes out the same in any worker, on any rank and after a resume. In
    the main process (`num_workers=0`) it puts their states back. Costs about 10 us a sample and
    80 us a batch; a dataset that draws nothing saves that with `is_deterministic = True`. torch's
    own TensorDataset draws nothing.

    Attributes that it lacks are the dataset's own; a plain whole number gives `dataset[index]`. A
    dataset with a method `at_epoch(index, epoch)` is asked by that one: what it gives may depend
    on the epoch (`data.resize`).

    Args:
        dataset: With `__getitem__` and `__len__`.
        seed: The run's seed.
        with_weight: Add "weight" (float32, 1 or 0) and "index" (int64) to each sample.

    Raises:
        UserError: With `with_weight`, when a sample is no dict.
    """

    def __init__(self, dataset: Any, seed: int, *, with_weight: bool = False) -> None:
        self.dataset, self.seed, self.with_weight = dataset, seed, with_weight

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # while unpickling nothing is there yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, key: SampleKey | int) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[SampleKey | int]) -> list[Any]:
        # DataLoader's fetcher asks for a whole batch here: the states are saved once per batch.
        if getattr(self.dataset, "is_deterministic", isinstance(self.dataset, TensorDataset)):
            return [self._sample(key) for key in keys]
        with _random_states_kept():
            return [self._sample(key, reseed=True) for key in keys]

    def _sample(self, key: SampleKey | int, reseed: bool = False) -> Any:
        if not isinstance(key, SampleKey):
            return self.dataset[key]
        if reseed:
            value = stable_seed(self.seed, key.epoch, key.index)
            random.seed(value)
            np.random.seed(value & 0xFFFFFFFF)
            # Not torch.manual_seed: that would also reset the GPUs' generators.
            torch.default_generator.manual_seed(value)
        at_epoch = getattr(self.dataset, "at_epoch", None)
        sample = at_epoch(key.index, key.epoch) if at_epoch else self.dataset[key.index]
        if not self.with_weight:
            return sample
        if not isinstance(sample, dict):
            raise UserError(
                "exact_evaluation = True needs samples that are dicts, to carry weight and index; "
                f"{type(self.dataset).__name__} gave {type(sample).__name__}"
            )
        # NumPy's scalar, since default_collate makes float64 of Python's floats. A sample may say
        # itself that it does not count (a damaged image, whose place another one has taken).
        weight = np.float32(key.weight * sample.get("weight", 1.0))
        return {**sample, "weight": weight, "index": key.index}


@contextmanager
def _random_states_kept() -> Iterator[None]:
    if get_worker_info() is not None:  # a worker draws nothing else
        yield
        return
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def distribute(
    source: LightningDataModule | LightningModule,
    *,
    rank: int,
    world_size: int,
    seed: int,
    position: TrainPosition,
    shuffle: bool | None = None,
) -> None:
    """Make what `source.*_dataloader()` return take its share of the data on this rank.

    Touched is every `DataLoader` over a map-style dataset whose sampler torch chose itself
    (`shuffle=True` or not). All its other settings stay.

    - Training: `TrainBatches`, which go on at `position`. The tail that fills no global batch is
      dropped in each epoch, `drop_last=False` or not: uneven ranks hang DDP. Where
      `train_dataloader` returns several loaders, each is sharded, but a resume in the middle of an
      epoch starts them from the epoch's beginning (with a warning).
    - Evaluation with `source.exact_evaluation = True`: `EvalBatches`, every sample once; samples
      must be dicts, in training too, and get "weight" and "index". A metric is
      `sum(weight * value) / sum(weight)`, the sums taken over all ranks.
    - Evaluation without it: left as it is on one rank; on several the first samples are repeated
      until the ranks are even, with a warning that says how many count twice.

    Left alone, with one warning per stage on several ranks: custom samplers and batch samplers,
    iterable datasets, subclasses of DataLoader, other iterables. They must shard by themselves, and
    a resume starts them anew.

    Args:
        source: Changed in place: its four `*_dataloader` methods are wrapped on the instance.
        rank: Of this process among those that take different data (not the pipeline's stages).
        world_size: How many of them there are.
        seed: The run's seed, the same on every rank.
        position: Shared with whoever counts the samples that were trained on.
        shuffle: Of training; None: as the loader says. False serves `overfit_batches`.
    """
    for stage in ("train", "val", "test", "predict"):
        hook = getattr(source, f"{stage}_dataloader")
        share = _Share(stage, source, rank, world_size, seed, position, shuffle)
        setattr(source, f"{stage}_dataloader", _wrapped(hook, share))


def _wrapped(hook: Callable[[], Any], share: _Share) -> Callable[[], Any]:
    @functools.wraps(hook)  # Lightning asks `__wrapped__` whether the user overrode the hook
    def dataloader() -> Any:
        return share.of(hook())

    return dataloader


@dataclass
class _Share:
    """One stage's loaders, cut down to one rank's share."""

    stage: str
    source: LightningDataModule | LightningModule
    rank: int
    world_size: int
    seed: int
    position: TrainPosition
    shuffle: bool | None
    warned: set[str] = field(default_factory=set)

    def of(self, loaders: Any) -> Any:
        several = _count(loaders) > 1
        if several and self.stage == "train" and self.position.consumed:
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
        if not _is_plain(loader):
            if self.world_size > 1:
                self._warn(
                    "custom",
                    "left as it is (a custom sampler or loader, or an iterable dataset): it must "
                    f"shard by itself over {self.world_size} ranks",
                )
            elif self.stage == "train" and self.position.consumed:
                self._warn("custom", "a custom sampler or loader starts the epoch anew")
            return loader
        batches = self._train(loader, resume) if self.stage == "train" else self._evaluate(loader)
        return loader if batches is None else _rebuilt(loader, self._keyed(loader), batches)

    @property
    def _exact(self) -> bool:
        return bool(getattr(self.source, "exact_evaluation", False))

    def _keyed(self, loader: DataLoader[Any]) -> KeyedDataset:
        return KeyedDataset(loader.dataset, self.seed, with_weight=self._exact)

    def _train(self, loader: DataLoader[Any], resume: bool) -> TrainBatches:
        shuffled = isinstance(loader.sampler, RandomSampler)
        return TrainBatches(
            len(loader.dataset),  # type: ignore[arg-type]
            loader.batch_size or 1,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            shuffle=shuffled if self.shuffle is None else self.shuffle,
            position=self.position,
            resume=resume,
            dataset=loader.dataset if hasattr(loader.dataset, "reached") else None,  # type: ignore[arg-type]
        )

    def _evaluate(self, loader: DataLoader[Any]) -> EvalBatches | None:
        if self.world_size == 1 and not self._exact:
            return None
        samples = len(loader.dataset)  # type: ignore[arg-type]
        twice = -samples % self.world_size
        if twice and not self._exact:
            self._warn(
                "twice",
                f"{samples} samples over {self.world_size} ranks: {twice} of them are counted "
                "twice. To count each once, return dict samples, set exact_evaluation = True on "
                f'{type(self.source).__name__} and weigh metrics by batch["weight"]',
            )
        return EvalBatches(
            samples,
            loader.batch_size or 1,
            rank=self.rank,
            world_size=self.world_size,
            exact=self._exact,
            drop_last=loader.drop_last,
        )

    def _warn(self, topic: str, text: str) -> None:
        if self.rank == 0 and topic not in self.warned:
            warnings.warn(f"{self.stage}_dataloader: {text}", stacklevel=2)
        self.warned.add(topic)


def _count(loaders: Any) -> int:
    if isinstance(loaders, CombinedLoader):
        return _count(loaders.iterables)
    if isinstance(loaders, Mapping):
        return sum(map(_count, loaders.values()))
    return sum(map(_count, loaders)) if isinstance(loaders, list | tuple) else 1


def _is_plain(loader: Any) -> bool:
    """Whether torch chose the sampler: only then another one may take its place."""
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return type(sampler) is SequentialSampler


def _rebuilt(
    loader: DataLoader[Any], dataset: KeyedDataset, batches: TrainBatches | EvalBatches
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
    )
