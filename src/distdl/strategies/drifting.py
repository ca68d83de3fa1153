"""Ranks whose weights drift apart between two meetings, and stand together where it matters.

Every validation and every checkpoint finds them equal: they meet first. So a checkpoint is an
ordinary one, for any strategy and any number of ranks, and a resume does what the run
that wrote it would have done.
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

from distdl.strategies.sharing import buckets

BUCKET_BYTES = 32 * 2**20


class DriftingStrategy(LightningDDP):
    """The base of strategies under which ranks take steps of their own.

    A subclass calls `drifted` after such a step and overrides `meet` if a meeting is more than an
    average. All ranks must do both at the same steps.

    - Weights and floating-point buffers (batch norm's statistics) are averaged at a meeting.
    - Moving averages of the weights (Lightning's WeightAveraging) are averaged before a validation
      or a checkpoint: being linear, they are then those of the averaged weights.
    - The optimizer's state is averaged before a checkpoint, and every rank continues with what was
      written.
    """

    _apart = False  # weights
    _states_apart = False  # optimizer's state and moving averages
    bytes_met = 0  # handed to the network in meetings, on this rank

    def drifted(self) -> None:
        self._apart = self._states_apart = dist.is_initialized() and dist.get_world_size() > 1

    def meet(self) -> None:
        """Gives all ranks the same weights and buffers: their mean."""
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
        """The weights for a checkpoint. While training, all ranks must call it (they meet)."""
        assert self.lightning_module is not None
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
        assert self.lightning_module is not None
        yield from (p for p in self.lightning_module.parameters() if p.requires_grad)
        yield from (b for b in self.lightning_module.buffers() if b.is_floating_point())

    def _moving_averages(self) -> Iterator[Tensor]:
        assert self.lightning_module is not None
        for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
            average = getattr(callback, "_average_model", None)
            if average is not None:
                values = average.module.state_dict().values()
                yield from (v for v in values if v.is_floating_point())


@torch.no_grad()
def average_(tensors: Iterable[Tensor]) -> int:
    """Puts the mean over all ranks into each tensor, in place.

    In buckets, for speed, so that it takes 64 MiB and not a second copy of a model. The layout of
    the tensors (channels_last) stays, which torch's own averager loses.

    Args:
        tensors: Floating point, on one device; of the same shapes and types on all ranks.

    Returns:
        Bytes handed to the network by this rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    handed = 0
    for bucket in buckets(tensors, BUCKET_BYTES):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        handed += flat.numel() * flat.element_size()
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
    return handed


def _states(optimizer: Optimizer) -> Iterator[Tensor]:
    """Momenta and the like, in the order of the parameters, which is the same on every rank."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key in sorted(state):
                value = state[key]
                # A single number counts steps.
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                    yield value
