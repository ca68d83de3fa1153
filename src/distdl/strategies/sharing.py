"""Parts shared by strategies whose ranks hold different slices of the model or its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torchmetrics
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch import nn
from torch.distributed.tensor import DTensor

from distdl.checkpoint import formats
from distdl.distributed import process_group
from distdl.util.errors import Problem

Tensor = TypeVar("Tensor", bound=torch.Tensor)


class Sliced(Strategy):
    """Base of strategies with slices: loads weights into the full module, then cuts it."""

    lightning_module: Any  # set before Lightning calls any of these methods
    sharded_checkpoints = False  # `checkpoint.sharded`
    replicas: dist.ProcessGroup | None = None  # whose buffers must agree; None: all ranks

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def on_validation_start(self) -> None:
        agree_on_buffers(self.lightning_module, self.replicas)

    on_test_start = on_predict_start = on_validation_start

    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        # Memory-mapped: each rank reads only the pages of its own slices.
        return formats.load(Path(checkpoint_path), weights_only=weights_only, mmap=True)


class Replicated(ParallelStrategy):
    """Base of strategies in which several ranks have the same samples: a number is reduced over
    `replicas`, which has one rank of each share of the data."""

    replicas: Any  # a dist.ProcessGroup, set before Lightning calls any of these methods

    def reduce(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        reduce_op: dist.ReduceOp | str | None = "mean",
    ) -> torch.Tensor:
        value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return super().reduce(value, group or self.replicas, reduce_op)  # type: ignore[safe-super]

    def all_gather(
        self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        return super().all_gather(tensor, group or self.replicas, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # Every rank has a vote, not only one of each share.
        votes = process_group.gather(bool(decision))
        return min(votes) if all else max(votes)

    def count_once(self, module: nn.Module) -> None:
        """Lets torchmetrics' metrics of a module count each sample once."""
        for metric in module.modules():
            if isinstance(metric, torchmetrics.Metric):
                metric.process_group = self.replicas


def agree_on_buffers(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Broadcasts the buffers (batch norm's running statistics) of `group`'s first rank. Collective.
    One that is divided over the ranks of a mesh (a DTensor) is the module's own matter.

    DDP does so before every forward. Training does not read the statistics, so broadcasting them
    before a validation and before saving is enough.
    """
    for buffer in module.buffers() if process_group.world_size() > 1 else ():
        if not isinstance(buffer, DTensor):
            dist.broadcast(buffer.data, group=group, group_src=0)


def buckets(tensors: Iterable[Tensor], limit: float) -> Iterator[list[Tensor]]:
    """Groups consecutive tensors of one dtype: at most `limit` bytes, or one larger tensor."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        more = tensor.numel() * tensor.element_size()
        if bucket and (size + more > limit or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
            size = 0
        bucket.append(tensor)
        size += more
    if bucket:
        yield bucket


def to_default_layout(module: nn.Module) -> None:
    """Puts weights into the default memory layout: slicing channels_last is not supported.

    Uses `clone`, since `contiguous` would return a 1 x 1 kernel with its channels_last strides.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def refuse_averaging(
    config: Mapping[str, Any], instead: str = "strategy=deepspeed_zero2 or strategy=ddp"
) -> Iterator[Problem]:
    """Refuses Lightning's weight averaging: it needs full weights, and would fail in a step."""
    for name, callback in (config.get("callbacks") or {}).items():
        if str((callback or {}).get("_target_", "")).endswith("WeightAveraging"):
            yield Problem(
                "",
                what=f"callbacks.{name} averages full weights, and here a rank has only slices",
                remedy=f"{instead}, or leave it out: ~callbacks.{name}",
                code="unsupported",
            )


def on_host(value: object) -> object:
    """A copy of a tensor in host memory, for a checkpoint; other values unchanged."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
