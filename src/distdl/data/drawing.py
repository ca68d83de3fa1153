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
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from distdl.util.seeds import stable_seed

# Their draws depend only on their generator, not on how often they were iterated.
_FORGETFUL = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


class Drawn:
    """Draws an epoch's order from a sampler or a batch sampler, for `TrainBatches`.

    Before each draw, it seeds every generator that the sampler may use by (seed, epoch): the global
    ones of Python, NumPy and torch, and those in the sampler's attributes. It calls `set_epoch` if
    the sampler has that method. Otherwise the sampler may count epochs itself, so after a resume
    the earlier epochs are drawn first.

    Args:
        sampler: With `__iter__` and `__len__`; does not depend on the rank.
        always_first: Every epoch has the order of the first one, for `overfit_batches`.
    """

    def __init__(self, sampler: Iterable[Any], always_first: bool = False) -> None:
        self.sampler, self.always_first = sampler, always_first
        self._epoch, self._order = -1, np.arange(0)

    def order(self, seed: int, epoch: int) -> np.ndarray[Any, Any]:
        """The order of an epoch: int64 [N], or objects [N] if the items are not integers."""
        epoch = 0 if self.always_first else epoch
        if epoch != self._epoch:
            counts = not hasattr(self.sampler, "set_epoch") and not _is_forgetful(self.sampler)
            before = range(self._epoch + 1, epoch) if counts else ()
            for number in (*before, epoch):
                self._order = self._draw(seed, number)
            self._epoch = epoch
        return self._order

    def reached(self, seed: int, epoch: int, place: int, order: np.ndarray[Any, Any]) -> None:
        pass

    def _draw(self, seed: int, epoch: int) -> np.ndarray[Any, Any]:
        value = stable_seed(seed, epoch)
        with random_states_kept():
            seed_all(value)
            for sampler in _within(self.sampler):
                for held in vars(sampler).values():
                    _reseed(held, value)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
            items = [_plain(item) for item in self.sampler]
        if all(isinstance(item, int) for item in items):
            return np.array(items, dtype=np.int64)
        order = np.empty(len(items), dtype=object)
        for place, item in enumerate(items):  # one by one: NumPy would make a 2-D array of lists
            order[place] = item
        return order


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restores the states of Python's, NumPy's and torch's CPU generators after the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_all(value: int) -> None:
    """Seeds Python's, NumPy's and torch's default CPU generators."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # Not torch.manual_seed: that would also reset the GPUs' generators.
    torch.default_generator.manual_seed(value)


def shards_itself(loader: Any) -> bool:
    """Whether a loader's sampler already gives each rank its own part.

    That is torch's DistributedSampler, or any sampler with `num_replicas` and `rank`.
    """
    samplers = [*_within(getattr(loader, "batch_sampler", None)), *_within(loader.sampler)]
    return any(
        isinstance(sampler, DistributedSampler)
        or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"))
        for sampler in samplers
    )


def _within(sampler: Any) -> Iterator[Any]:
    """A sampler and the samplers inside it."""
    if not hasattr(sampler, "__dict__"):
        return
    yield sampler
    for held in vars(sampler).values():
        if isinstance(held, Sampler):
            yield from _within(held)


def _is_forgetful(sampler: Any) -> bool:
    if type(sampler) is BatchSampler:
        return _is_forgetful(sampler.sampler)
    return type(sampler) in _FORGETFUL


def _reseed(held: Any, value: int) -> None:
    if isinstance(held, torch.Generator):
        held.manual_seed(value)
    elif isinstance(held, np.random.Generator):
        kind = type(held.bit_generator)
        held.bit_generator.state = kind(value).state
    elif isinstance(held, np.random.RandomState):
        held.seed(value & 0xFFFFFFFF)
    elif isinstance(held, random.Random):
        held.seed(value)


def _plain(item: Any) -> Any:
    """Converts an integer, or each integer in a list, to Python's int; keeps anything else."""
    if isinstance(item, list):
        return [_plain(each) for each in item]
    try:
        return operator.index(item)
    except (TypeError, RuntimeError, ValueError):  # torch's, for a tensor of several numbers
        return item
