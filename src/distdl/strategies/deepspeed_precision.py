"""Mixed precision under DeepSpeed: autocast as under DDP. DeepSpeed clips in its own step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision

from distdl.util.errors import UserError


class AutocastPrecision(DeepSpeedPrecision):
    """Lightning's plugin; if `autocasts_on` is set, with bfloat16 autocast, not 16-bit weights."""

    autocasts_on: str | None = None
    by_hand = False

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        if self.by_hand:  # the Trainer's clipping is in DeepSpeed's settings
            what = "DeepSpeed clips in its own step, and self.clip_gradients does nothing"
            remedy = 'strategy.config=FILE, with "gradient_clipping" in it; or strategy=ddp'
            raise UserError.at("strategy", what, remedy)

    def convert_input(self, data: Any) -> Any:
        return data if self.autocasts_on else super().convert_input(data)

    def forward_context(self) -> Any:
        # A training engine autocasts by itself, to the same type; a validation may have no engine.
        if self.autocasts_on is None:
            return nullcontext()
        return torch.autocast(self.autocasts_on, torch.bfloat16)

    def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Lightning has already divided the loss by the number of accumulated batches.
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)
