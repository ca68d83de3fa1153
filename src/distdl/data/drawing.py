"""The order of a custom sampler: the same on every rank and after a resume."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from distdl.data.own_generators import KINDS, reseed
from distdl.util.seeds import stable_seed

# Samplers whose draws depend only on their generator, not on how often they were iterated.
_FORGETFUL = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


class Drawn:
    """Draws an epoch's order from a sampler or a batch sampler, for `TrainBatches`.

    Before each draw, every generator that the sampler may use is seeded by (seed, epoch): the
    global ones and those in the sampler's attributes. `set_epoch` is called if the sampler has it.
    Otherwise the sampler may count epochs itself, so a resume first draws the earlier epochs again.

    Args:
        sampler: With `__iter__` and `__len__`; does not depend on the rank.
        always_first: Every epoch has the order of the first one, for `overfit_batches`.
    """

    def __init__(self, sampler: Iterable[Any], always_first: bool = False) -> None:
        self.sampler = sampler
        self.always_first = always_first
        self._epoch = -1
        self._order = np.arange(0)

    def order(self, seed: int, epoch: int) -> np.ndarray[Any, Any]:
        """The order of an epoch: int64 [N], or objects [N] if the items are not integers."""
        epoch = 0 if self.always_first else epoch
        if epoch != self._epoch:
            batches = type(self.sampler) is BatchSampler
            kind = type(self.sampler.sampler if batches else self.sampler)  # type: ignore[attr-defined]
            counts = not hasattr(self.sampler, "set_epoch") and kind not in _FORGETFUL
            for number in range(self._epoch + 1 if counts else epoch, epoch + 1):
                self._order = self._draw(seed, number)
            self._epoch = epoch
        return self._order

    def reached(self, seed: int, epoch: int, start: int, order: np.ndarray[Any, Any]) -> None:
        pass

    def _draw(self, seed: int, epoch: int) -> np.ndarray[Any, Any]:
        value = stable_seed(seed, epoch)
        with random_states_kept():
            seed_all(value)
            for sampler in _within(self.sampler):
                for held in vars(sampler).values():
                    if isinstance(held, KINDS):
                        reseed(held, value)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
            items = [_plain(item) for item in self.sampler]
        if all(isinstance(item, int) for item in items):
            return np.array(items, dtype=np.int64)
        # One by one: NumPy would make a 2-D array of lists.
        return np.fromiter(items, dtype=object, count=len(items))


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restores the states of Python's, NumPy's and torch's CPU generators after the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    restore: list[Any] = [random.setstate, np.random.set_state, torch.set_rng_state]
    try:
        yield
    finally:
        for function, state in zip(restore, states, strict=True):
            function(state)


def seed_all(value: int) -> None:
    """Seeds Python's, NumPy's and torch's default CPU generators."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # Not torch.manual_seed: that would also reset the GPUs' generators.
    torch.default_generator.manual_seed(value)


def shards_itself(loader: DataLoader[Any]) -> bool:
    """Whether a sampler already gives each rank its part: it has `num_replicas` and `rank`."""
    each_has = (hasattr(s, "num_replicas") and hasattr(s, "rank") for s in samplers_of(loader))
    return any(each_has)


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """A loader's batch sampler and sampler, and those inside them."""
    return [*_within(loader.batch_sampler), *_within(loader.sampler)]


def _within(sampler: object) -> Iterator[Any]:
    """A sampler and the samplers inside it."""
    if not hasattr(sampler, "__dict__"):
        return
    yield sampler
    for held in vars(sampler).values():
        if isinstance(held, Sampler):
            yield from _within(held)


def _plain(item: object) -> object:
    """Integers, also those in a list, as Python's int; anything else unchanged."""
    if isinstance(item, list):
        return [_plain(each) for each in item]
    if not hasattr(item, "__index__"):
        return item
    try:
        return operator.index(item)
    except (TypeError, RuntimeError, ValueError):  # an array or a tensor of several numbers
        return item
