"""Batch norms that would get one value per channel, of which there are no statistics.

torch refuses it in the first training step. It happens to a batch of one sample per device, where
the network has shrunk it to one pixel: images of 32 pixels in a ResNet, for example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distdl.config import task_facts
from distdl.config.recipe import is_own
from distdl.models.freezing import Frozen
from distdl.util.errors import Problem


def size_of_one(context: Mapping[str, Any]) -> int | None:
    """The height and width of training images, if each device gets one at a time; else None, also
    if the size is not known or the statistics are those of all devices.

    Args:
        context: Of a node's check.
    """
    config = context.get("config") or {}
    data = config.get("data") or {}
    strategy = config.get("strategy") or {}
    trainer = config.get("trainer") or {}
    if context.get("batch_chosen_later") or data.get("batch_size") != 1:
        return None
    if "training_step" not in task_facts.of(config).calls or strategy.get("autotune"):
        return None
    if trainer.get("sync_batchnorm") and context.get("world_size", 1) > 1:
        return None
    if str(strategy.get("_target_")).endswith(".PipelineStrategy"):
        return None  # it looks at its micro-batches before it starts
    if not is_own(data.get("_target_")):
        return None
    resize = data.get("resize") or {}
    sizes = [data.get("image_size"), resize.get("from"), resize.get("to")]
    return min((size for size in sizes if isinstance(size, int)), default=None)


def problem(network: nn.Module, frozen: Frozen, size: int) -> Problem | None:
    """Sends one image through a network on `meta`, as in training.

    Args:
        frozen: The norms that use the statistics that they have.

    Returns:
        A problem of `model.norm`, with its path in the model's node; None: there is none, or the
        network cannot be called there.
    """
    network.train()
    frozen.keep_statistics(network)
    called: list[str] = []
    hooks = [
        part.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, part in network.named_modules()
        if isinstance(part, _BatchNorm) and part.training
    ]
    if not hooks:
        return None
    text = ""
    try:
        with torch.no_grad():
            network(torch.empty(1, 3, size, size, device="meta"))
    except Exception as error:  # a user's network runs, and some cannot on `meta`
        text = str(error)
    finally:
        for hook in hooks:
            hook.remove()
    if "more than 1 value per channel" not in text or not called:
        return None
    return Problem(
        "norm",
        what=(
            f"batch norm in {called[-1]} gets one value per channel from a batch of one image of "
            f"{size} x {size} pixels"
        ),
        remedy="data.batch_size=2 or more, model.norm=group, or larger images",
        code="not-enough",
    )
