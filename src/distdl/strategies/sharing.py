"""What strategies whose ranks do not hold the same things have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def agree_on_buffers(module: nn.Module) -> None:
    """Gives every rank rank 0's buffers: running statistics of batch norm above all.

    Each rank has seen other images. DDP broadcasts rank 0's before every forward; in training
    nothing reads them, so doing it before a validation and before saving comes to the same, and
    what is saved is what DDP would have saved.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


def lay_out_plainly(module: nn.Module) -> None:
    """Weights in the default memory layout: slices of channels_last ones are not supported.

    A clone, since a 1 x 1 kernel counts as contiguous in either layout, and keeps its strides.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def check_keys(own: Iterable[str], given: Mapping[str, Any], strict: bool) -> None:
    """Compares a module's names with a checkpoint's.

    Raises:
        RuntimeError: With `strict`, when they differ; torch's own `load_state_dict` raises it too.
    """
    names = set(own)
    missing, unexpected = sorted(names - given.keys()), sorted(given.keys() - names)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"the checkpoint's weights do not fit the model: missing {missing}, "
            f"unexpected {unexpected}"
        )


def on_host(value: Any) -> Any:
    """A tensor's copy in host memory, for a checkpoint; anything else as it is."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
