"""Checkpoints that hold low-rank adapters alone (`model.lora`), beside weights of another file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distdl.util.errors import UserError

KEY = "distdl_lora"  # in a checkpoint: what the frozen weights were


def refuse_adapters(checkpoint: Mapping[str, Any], file: str) -> None:
    """For whoever needs all weights.

    Raises:
        UserError: The checkpoint has adapters alone.
    """
    if KEY not in checkpoint:
        return
    raise UserError.at(
        file,
        what="it holds what model.lora trains, and not the weights beside it",
        remedy="distdl export RUN --to weights writes both as one model.safetensors",
        code="incomplete",
    )
