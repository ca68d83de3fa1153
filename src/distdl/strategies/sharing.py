"""What strategies whose ranks do not hold the same things have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import nn

from distdl.checkpoint import formats
from distdl.util.errors import Problem

Tensor = TypeVar("Tensor", bound=torch.Tensor)


class Sliced(Strategy):
    """Where each rank holds slices: weights are read into the full module, which is then cut."""

    sharded_checkpoints = False  # `checkpoint.sharded`

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def on_validation_start(self) -> None:
        assert self.lightning_module is not None
        agree_on_buffers(self.lightning_module)

    on_test_start = on_predict_start = on_validation_start

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        # Mapped, not read: each rank touches the pages of its own slices.
        return formats.load(Path(checkpoint_path), weights_only=weights_only, mmap=True)


def agree_on_buffers(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Gives every rank of `group` the buffers of its first one: batch norm's running statistics.

    DDP broadcasts rank 0's before every forward. In training nothing reads them, so it is enough
    before a validation and before saving: what is saved is what DDP would have saved. Collective.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for buffer in module.buffers():
        dist.broadcast(buffer.data, group=group, group_src=0)


def buckets(tensors: Iterable[Tensor], limit: float) -> Iterator[list[Tensor]]:
    """Runs of tensors of one type, together no larger than `limit` bytes (or just one)."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        more = tensor.numel() * tensor.element_size()
        if bucket and (size + more > limit or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += more
    if bucket:
        yield bucket


def lay_out_plainly(module: nn.Module) -> None:
    """Weights in the default memory layout: slices of channels_last ones are not supported.

    A clone, since a 1 x 1 kernel counts as contiguous in either layout, and keeps its strides.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def refuse_averaging(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Lightning's averages of weights copy a module with all its weights: FSDP2 and ZeRO-3 leave
    each rank a slice, on which they fail in the first step."""
    for name, callback in (config.get("callbacks") or {}).items():
        target = str((callback or {}).get("_target_", ""))
        if target.endswith("WeightAveraging"):
            what = f"callbacks.{name} averages whole weights, and here a rank has a slice"
            remedy = f"strategy=deepspeed_zero2 or strategy=ddp, or leave it out: ~callbacks.{name}"
            yield Problem("", what, remedy)


def on_host(value: Any) -> Any:
    """A tensor's own copy in host memory, for a checkpoint; anything else as it is."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
