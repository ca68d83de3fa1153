"""An exponential moving average of the weights without device syncs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging as LightningEMA
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class EMAWeightAveraging(LightningEMA):
    """Lightning's EMAWeightAveraging, with the same arguments and checkpoints.

    The class name is the same because it is the key in a checkpoint. torch's AveragedModel counts
    its updates on the device and reads the count twice per step. Here the count is on the host. The
    weights are averaged in groups (`get_ema_multi_avg_fn`), so results differ from Lightning's by
    rounding errors.

    Args:
        decay: Decay of the average per update.
        kwargs: See Lightning's EMAWeightAveraging.
    """

    def __init__(
        self,
        decay: float = 0.999,
        **kwargs: Any,  # noqa: ANN401 - arguments of Lightning's own, passed on
    ) -> None:
        super().__init__(decay=decay, **kwargs)
        del self._kwargs["avg_fn"]
        self._kwargs["multi_avg_fn"] = get_ema_multi_avg_fn(decay)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            average = self._average_model
            assert average is not None
            average.__class__ = CountedOnHost  # Lightning creates torch's class
            average.n_averaged = average.n_averaged.cpu()


class CountedOnHost(AveragedModel):
    """torch's AveragedModel with `n_averaged` on the host, and as the number `updates`."""

    n_averaged: Tensor
    updates = 0

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        result = super().load_state_dict(state_dict, strict, assign)
        self.updates = int(self.n_averaged)
        return result

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Updates the average by `multi_avg_fn`. The first update copies the weights."""
        assert self.multi_avg_fn is not None
        groups = defaultdict[Any, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
        pairs = zip(self.module.parameters(), model.parameters(), strict=True)
        buffers = zip(self.module.buffers(), model.buffers(), strict=True)
        for mean, value in itertools.chain(pairs, buffers if self.use_buffers else ()):
            means, values = groups[mean.device, mean.dtype]
            means.append(mean.detach())
            # Also to its type: with trainer.precision=bf16-true the average stays in float32.
            values.append(value.detach().to(mean))
        for means, values in groups.values():
            if self.updates == 0:
                torch._foreach_copy_(means, values)
            else:
                self.multi_avg_fn(means, values, self.updates)
        if not self.use_buffers:
            for mean, value in buffers:
                mean.copy_(value)
        self.updates += 1
        self.n_averaged += 1
