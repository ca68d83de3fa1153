"""Samples by their keys, so that what is drawn for one depends on the key alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from distdl.data.drawing import random_states_kept, seed_all
from distdl.data.encoded import EncodedData
from distdl.data.own_generators import OwnGenerators
from distdl.data.sampling import SampleKey
from distdl.util.errors import UserError
from distdl.util.seeds import stable_seed


class KeyedDataset(Dataset[Any]):
    """A map-style dataset whose random augmentation depends only on (seed, epoch, index).

    Before `dataset[index]` it seeds the default CPU generators of Python, NumPy and torch, and
    those that the dataset holds (`OwnGenerators`). After a batch's samples its own are seeded by
    the batch, for `collate_fn`. In a worker so are the default ones; in the main process these get
    their states back, which a checkpoint holds. It costs about 10 us per sample, 80 us per batch,
    and as much again for own ones. A class without randomness avoids the cost with
    `is_deterministic = True`; a plain TensorDataset needs no mark. A subclass does not inherit the
    mark, as it may draw.

    Images that draw apart (`EncodedData.draws_apart`) need no seeds: a batch of them is assembled
    at once, in any thread.

    Other attributes are looked up on the wrapped dataset. A plain integer key gives
    `dataset[index]`. A method `at_epoch(index, epoch)` of the dataset is called instead, if it
    exists, so that a sample may depend on the epoch (`data.resize`).

    Args:
        dataset: With `__getitem__` and `__len__`.
        seed: The run's seed.
        with_weight: Add "weight" (float32, 1 or 0) and "index" (int64) to each sample.
        collate_fn: Makes a batch of the samples, and may draw as well.

    Raises:
        UserError: With `with_weight`, when a sample is not a dict.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        *,
        with_weight: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.dataset: Any = dataset  # torch's class states no length
        self.seed = seed
        self.with_weight = with_weight
        self.own_generators = OwnGenerators(dataset=dataset, collate_fn=collate_fn)
        self.assembles = (
            isinstance(dataset, EncodedData)
            and dataset.draws_apart
            and with_weight
            and collate_fn == dataset.collate
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "dataset":  # unset while unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, key: SampleKey | int) -> object:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]:
        # DataLoader's fetcher calls this per batch, so the states are saved once per batch.
        if not keys or not isinstance(keys[0], SampleKey):
            return [self.dataset[key] for key in keys]
        if self.assembles:
            return self.dataset.assembled(keys, self.seed)
        in_worker = get_worker_info() is not None
        draws = not is_marked(self.dataset)
        # In a worker nothing else needs the old states.
        with random_states_kept() if draws and not in_worker else nullcontext():
            samples = self._samples(keys, draws)
        batch = (self.seed, keys[0].epoch, keys[0].index, "batch")
        if in_worker:
            seed_all(stable_seed(*batch))
        self.own_generators.seed(*batch)
        return samples

    def _samples(self, keys: Sequence[SampleKey], draws: bool) -> list[Any]:
        epoch = keys[0].epoch
        is_new = self.own_generators.is_new(epoch)
        if is_new:
            self.own_generators.look(epoch)
        self.own_generators.refresh()
        first = self._sample(keys[0], draws)
        if is_new and draws and self.own_generators.look(epoch):
            # The first sample has made a generator, which could not be seeded before it drew.
            first = self._sample(keys[0], draws)
        samples = [first]
        samples += [self._sample(key, draws) for key in keys[1:]]
        return samples

    def _sample(self, key: SampleKey, draws: bool) -> object:
        if draws:
            sample_of = (self.seed, key.epoch, key.index)
            seed_all(stable_seed(*sample_of))
            self.own_generators.seed(*sample_of)
        at_epoch = getattr(self.dataset, "at_epoch", None)
        sample = at_epoch(key.index, key.epoch) if at_epoch else self.dataset[key.index]
        if not self.with_weight:
            return sample
        if not isinstance(sample, dict):
            raise UserError.at(
                "",
                what=(
                    "exact_evaluation = True needs samples that are dicts, "
                    "to carry weight and index; "
                    f"{type(self.dataset).__name__} gave {type(sample).__name__}"
                ),
                code="wrong-type",
            )
        # A NumPy scalar, since default_collate turns Python floats into float64. A sample may have
        # a weight of 0 itself (a damaged image that was replaced by another one).
        weight = np.float32(key.weight * sample.get("weight", 1.0))
        return {**sample, "weight": weight, "index": key.index}


def is_marked(dataset: object) -> bool:
    """Whether a dataset states, itself or by its very class, that it draws nothing."""
    kind = type(dataset)
    states = "is_deterministic" in vars(kind)
    if states or "is_deterministic" in getattr(dataset, "__dict__", ()):
        return bool(getattr(dataset, "is_deterministic", False))
    return kind is TensorDataset
