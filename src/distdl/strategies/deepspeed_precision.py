"""Mixed precision under DeepSpeed: autocast, as under DDP."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision

from distdl.util.errors import UserError


class AutocastPrecision(DeepSpeedPrecision):
    """Lightning's plugin. If `autocasts_on` (a device type) is set, autocast to bfloat16 replaces
    weights in 16 bits."""

    autocasts_on: str | None = None
    optimizes_manually = False

    def clip_gradients(self, *args: object, **kwargs: object) -> None:
        if self.optimizes_manually:  # else the Trainer's clipping is in DeepSpeed's settings
            raise UserError.at(
                "strategy",
                what="self.clip_gradients has no effect: DeepSpeed clips in its own step",
                remedy='strategy.config=FILE, with "gradient_clipping" in it; or strategy=ddp',
                code="conflict",
            )

    def convert_input(self, data: object) -> object:
        return data if self.autocasts_on else super().convert_input(data)

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        # An engine for training also autocasts, to the same type; a validation may have no engine.
        if self.autocasts_on is None:
            yield
            return
        with torch.autocast(self.autocasts_on, torch.bfloat16):
            yield

    def backward(  # type: ignore[override]  # as Lightning's own overrides its base
        self,
        tensor: torch.Tensor,
        model: LightningModule,
        optimizer: Steppable | None,
        *args: object,
        **kwargs: object,
    ) -> None:
        # Lightning has already divided the loss by the number of accumulated batches.
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)
