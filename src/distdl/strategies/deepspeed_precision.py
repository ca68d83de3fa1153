"""Mixed precision under DeepSpeed: autocast, as under DDP."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision

from distdl.util.errors import UserError


class AutocastPrecision(DeepSpeedPrecision):
    """Lightning's plugin. If `autocasts_on` (a device type) is set, autocast to bfloat16 replaces
    weights in 16 bits."""

    autocasts_on: str | None = None
    optimizes_manually = False

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        if self.optimizes_manually:  # else the Trainer's clipping is in DeepSpeed's settings
            what = "self.clip_gradients has no effect: DeepSpeed clips in its own step"
            remedy = 'strategy.config=FILE, with "gradient_clipping" in it; or strategy=ddp'
            raise UserError.at("strategy", what, remedy)

    def convert_input(self, data: Any) -> Any:
        return data if self.autocasts_on else super().convert_input(data)

    def forward_context(self) -> Any:
        # An engine for training also autocasts, to the same type; a validation may have no engine.
        if self.autocasts_on is None:
            return nullcontext()
        return torch.autocast(self.autocasts_on, torch.bfloat16)

    def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Lightning has already divided the loss by the number of accumulated batches.
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)
