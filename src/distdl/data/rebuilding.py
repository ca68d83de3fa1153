"""Rebuilds the user's loader with other batches."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.data import (
    _get_dataloader_init_args_and_kwargs,
    _reinstantiate_wrapped_cls,
    _replace_value_in_saved_args,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader, Dataset

from distdl.data.sampling import EvalBatches, InOrder, TrainBatches
from distdl.data.worker_signals import Surviving


class NotRebuilt(Exception):
    """The batches of a DataLoader subclass cannot be replaced."""


def rebuilt(
    loader: DataLoader[Any], dataset: Dataset[Any], batches: TrainBatches | EvalBatches
) -> DataLoader[Any]:
    """A loader of the same class and settings that gives `batches` of `dataset`.

    A subclass is created again with its own arguments, as Lightning does it for its samplers.

    Raises:
        NotRebuilt: Its arguments are unknown, or it does not use the sampler that it is given.
    """
    if type(loader) is not DataLoader:
        return _of_subclass(loader, dataset, batches)
    batching: dict[str, Any] = {"batch_sampler": batches}
    if loader.batch_sampler is None:
        batching = {"sampler": InOrder(batches), "batch_size": None}
    return DataLoader(
        dataset,
        **batching,
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


def _of_subclass(
    loader: DataLoader[Any], dataset: Dataset[Any], batches: TrainBatches | EvalBatches
) -> DataLoader[Any]:
    one_by_one = InOrder(batches)
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
    taken = inner is batches or made.sampler is one_by_one
    if isinstance(batches, TrainBatches) and type(inner) is BatchSampler:
        taken = taken and inner.batch_size == batches.batch_size
    if not taken:
        raise NotRebuilt("its __init__ does not hand sampler and batch_size on to DataLoader")
    # Set only now, since its __init__ may check the dataset's type. DataLoader forbids setattr.
    object.__setattr__(made, "dataset", dataset)
    if not isinstance(made.worker_init_fn, Surviving):
        made.worker_init_fn = Surviving(made.worker_init_fn)
    return made
