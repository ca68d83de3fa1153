"""Mixed precision under DeepSpeed as under DDP: by autocast, and clipping in its own step alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision

from distdl.util.errors import UserError


class AutocastPrecision(DeepSpeedPrecision):
    """Lightning's, with autocast to bfloat16 instead of 16 bit weights where a device is set."""

    autocasts_on: str | None = None
    by_hand = False

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        if self.by_hand:  # by the Trainer is in DeepSpeed's settings
            what = "DeepSpeed clips in its own step, and self.clip_gradients does nothing"
            remedy = 'strategy.config=FILE, with "gradient_clipping" in it; or strategy=ddp'
            raise UserError.at("strategy", what, remedy)

    def convert_input(self, data: Any) -> Any:
        return data if self.autocasts_on else super().convert_input(data)

    def forward_context(self) -> Any:
        # The engine does it by itself, for the same type; a validation may have no engine.
        if self.autocasts_on is None:
            return nullcontext()
        return torch.autocast(self.autocasts_on, torch.bfloat16)

    def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Lightning has divided the loss by the number of accumulated batches already.
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)
