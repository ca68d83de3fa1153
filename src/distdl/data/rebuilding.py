"""Rebuilds the user's loader with other batches, or splits its iterable dataset over the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import (
    _get_dataloader_init_args_and_kwargs,
    _reinstantiate_wrapped_cls,
    _replace_value_in_saved_args,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from distdl.data.drawing import samplers_of
from distdl.data.sampling import (
    EvalBatches,
    InOrder,
    Placed,
    PlacedInOrder,
    RecentBatches,
    TrainBatches,
)
from distdl.data.worker_end import EndingWithRank
from distdl.util.errors import NotRebuilt

# Arguments that a DataLoader keeps as attributes, except for the dataset and the samplers.
SETTINGS: tuple[str, ...] = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
    "collate_fn",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
)


def of_torch(sampler: object) -> bool:
    """Whether a sampler's class is torch's, or its twin of torchdata's StatefulDataLoader."""
    return type(sampler).__module__.partition(".")[0] in ("torch", "torchdata")


def rebuilt(
    loader: DataLoader[Any], dataset: Dataset[Any], batches: TrainBatches | EvalBatches
) -> DataLoader[Any]:
    """A loader of the same class and settings that gives `batches` of `dataset`. A subclass is
    created again with its original arguments, as Lightning does to replace samplers.

    Raises:
        NotRebuilt: The subclass's arguments are unknown, or it does not use the new sampler.
    """
    if not (of_torch(loader) or type(loader).__module__ == "distdl.data.threads"):
        return _of_subclass(loader, dataset, batches)
    # Not torchdata's `snapshot_every_n_steps`: with 1, a state has no batches to be skipped again.
    settings: dict[str, Any] = {name: getattr(loader, name) for name in SETTINGS}
    if loader.batch_sampler is None:
        return type(loader)(dataset, sampler=in_order(batches), batch_size=None, **settings)
    return type(loader)(dataset, batch_sampler=batches, **settings)


def recent(loader: object, most: int) -> DataLoader[Any] | None:
    """A loader of the batches that this rank was trained on last (`RecentBatches`), with workers of
    its own; None: the training's loader does not give its batches again.

    Args:
        loader: Of the training, as `distribute` has made it.
    """
    of = loader if isinstance(loader, DataLoader) else None
    samplers = [] if of is None else samplers_of(of)
    batches = next((each for each in samplers if isinstance(each, TrainBatches)), None)
    if of is None or batches is None:
        return None
    try:
        made = rebuilt(of, of.dataset, RecentBatches(batches, most))
    except NotRebuilt:
        return None
    made.generator = torch.Generator().manual_seed(batches.seed)  # the training's draws nothing
    return made


def in_order(batches: TrainBatches | EvalBatches) -> InOrder:
    return PlacedInOrder(batches) if isinstance(batches, Placed) else InOrder(batches)


def _of_subclass(
    loader: DataLoader[Any], dataset: Dataset[Any], batches: TrainBatches | EvalBatches
) -> DataLoader[Any]:
    one_by_one = in_order(batches)
    try:
        if batches.batched:
            # Lightning recorded these when the hook created the loader.
            names = ("args", "kwargs", "default_kwargs", "arg_names")
            saved = [getattr(loader, f"__pl_saved_{name}") for name in names]
            is_taken, args, kwargs = _replace_value_in_saved_args("batch_sampler", batches, *saved)
            if not is_taken:
                raise TypeError("its __init__ takes no batch_sampler")
        else:
            args, kwargs = _get_dataloader_init_args_and_kwargs(loader, one_by_one)
        made = _reinstantiate_wrapped_cls(loader, *args, **kwargs)
    except (TypeError, AttributeError, MisconfigurationException) as error:
        raise NotRebuilt(str(error).strip()) from error
    inner = made.batch_sampler
    taken = inner is batches or one_by_one in (made.sampler, getattr(inner, "sampler", None))
    if isinstance(batches, TrainBatches) and isinstance(inner, BatchSampler) and of_torch(inner):
        taken = taken and inner.batch_size == batches.batch_size
    if not taken:
        raise NotRebuilt("its __init__ does not pass sampler and batch_size to DataLoader")
    # Set only now, since `__init__` may check the dataset's type. DataLoader forbids setattr.
    object.__setattr__(made, "dataset", dataset)
    if not isinstance(made.worker_init_fn, EndingWithRank):
        made.worker_init_fn = EndingWithRank(made.worker_init_fn)
    return made


class Striding(IterableDataset[Any]):
    """Every `world_size`-th sample of another dataset, starting at the `rank`-th.

    The dataset must give the same samples on every rank. A last incomplete round is dropped, so
    that all ranks get equally many. Each worker process does this with the samples that it gets.
    """

    def __init__(self, dataset: IterableDataset[Any], rank: int, world_size: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        while len(row := list(itertools.islice(samples, self.world_size))) == self.world_size:
            yield row[self.rank]

    def __len__(self) -> int:
        return len(self.dataset) // self.world_size  # type: ignore[arg-type]  # TypeError: unknown

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "dataset":  # unset while unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)
