"""Strategies under which the ranks' weights differ between two synchronisations ("meetings").

Ranks meet before every validation and every checkpoint, so their weights are equal there. A
checkpoint is therefore an ordinary one, for any strategy and any number of ranks, and a resumed run
continues as the original run would have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy as LightningDDP
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from distdl.distributed import process_group
from distdl.strategies.sharing import buckets

BUCKET_BYTES = 32 * 2**20


class DriftingStrategy(LightningDDP):
    """Base of strategies whose ranks take local steps. Subclasses call `drifted` after each one.

    A meeting averages weights and floating-point buffers (batch norm's statistics). Before a
    validation or a checkpoint, moving averages of the weights (Lightning's WeightAveraging, which
    is linear) are averaged too; before a checkpoint, also the optimizer's state.
    """

    lightning_module: Any  # set before Lightning calls any of these methods
    _apart = False  # weights may differ between ranks
    _states_apart = False  # optimizer state and moving averages may differ
    bytes_met = 0  # sent by this rank in meetings

    def drifted(self) -> None:
        self._apart = self._states_apart = process_group.world_size() > 1

    def meet(self) -> None:
        """Replaces the weights and buffers of all ranks by their mean."""
        self.bytes_met += average_(self._weights())
        self._apart = False

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._apart:
            self.meet()
        if self._states_apart:
            self.bytes_met += average_(self._moving_averages())

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._apart:
            self.meet()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights for a checkpoint. During training it is collective: the ranks meet."""
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            if self._apart:
                self.meet()
            if self._states_apart:
                self.bytes_met += average_(self._moving_averages())
                for optimizer in self.optimizers:
                    self.bytes_met += average_(_states(optimizer))
                self._states_apart = False
        return super().lightning_module_state_dict()

    def _weights(self) -> Iterator[Tensor]:
        yield from (p for p in self.lightning_module.parameters() if p.requires_grad)
        yield from (b for b in self.lightning_module.buffers() if b.is_floating_point())

    def _moving_averages(self) -> Iterator[Tensor]:
        for callback in self.lightning_module.trainer.callbacks:
            if (average := getattr(callback, "_average_model", None)) is not None:
                values = average.module.state_dict().values()
                yield from (v for v in values if v.is_floating_point())


@torch.no_grad()
def average_(tensors: Iterable[Tensor]) -> int:
    """Replaces each tensor by its mean over all ranks, in place.

    The memory layout (channels_last) is kept; torch's own averager loses it.

    Args:
        tensors: Floating point, on one device; of the same shapes and types on all ranks.

    Returns:
        Bytes sent by this rank.
    """
    if process_group.world_size() == 1:
        return 0
    sent = 0
    for bucket in buckets(tensors, BUCKET_BYTES):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        sent += flat.numel() * flat.element_size()
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
    return sent


def _states(optimizer: Optimizer) -> Iterator[Tensor]:
    """State tensors (momenta), in the order of the parameters: the same on every rank."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for _, value in sorted(optimizer.state.get(parameter, {}).items()):
                # A zero-dimensional tensor is a step count.
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                    yield value
