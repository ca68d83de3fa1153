"""What a training step is made of, before and without training: a batch, the module, the loss.

The module is built without memory, and its parameters and batch may be fake tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from distdl.config.recipe import plain
from distdl.config.schema import TrainerArguments
from distdl.util.errors import UserError
from distdl.validation.meta import without_weights
from distdl.worker.build import make, make_module

SAMPLES = 4  # that are loaded; fake tensors have the size of the full batch
AUTOCAST = ("16-mixed", "bf16-mixed", "16", "bf16", "transformer-engine-float16")
HALF = ("16-true", "bf16-true", "transformer-engine")


def a_batch(config: DictConfig) -> tuple[int, Any]:
    """The number of samples loaded, and the batch as the training step receives it."""
    from distdl.callbacks.metrics import batch_size_of

    try:
        if config.get("data"):
            node = plain(config.data)
            few = {"batch_size": min(SAMPLES, int(node.get("batch_size", 1))), "num_workers": 0}
            source = make(node | {key: few[key] for key in few.keys() & node.keys()})
            source.setup("fit")
        else:
            source = make_module(config.model)
        batch = source.on_before_batch_transfer(next(iter(source.train_dataloader())), 0)
        batch = source.on_after_batch_transfer(batch, 0)
    except Exception as error:  # the user's data module runs
        raise UserError.at(
            "data",
            what=f"no batch can be loaded here: {type(error).__name__}: {error}",
            remedy="plan with random images of the same size: data=synthetic data.image_size=...",
            code="failed",
        ) from error
    return batch_size_of(batch) or 1, batch


def stretched(samples: int, size: int) -> Callable[[Tensor], Tensor]:
    """Makes a batch of `size` samples of one of a few, without values."""

    def stretch(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if shape and shape[0] == samples:
            shape[0] = size
        return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    return stretch


def without_memory(config: DictConfig) -> LightningModule:
    """The module on the meta device, if it can be built there; else on the CPU."""
    bare = without_weights(plain(config.model))
    bare.pop("compile", None)
    try:
        with torch.device("meta"):
            return in_precision(make_module(bare), config)
    except Exception:  # timm, for example, reads values while building
        return in_precision(make_module(bare), config)


def as_fake(module: LightningModule) -> LightningModule:
    """Replaces all parameters and buffers with fake tensors on a fake CPU."""

    @functools.cache  # by identity: shared ones stay shared
    def fake(tensor: Tensor) -> Tensor:
        empty = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
        )
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty

    for part in module.modules():
        owned: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for tensors in owned:
            tensors.update({k: fake(v) for k, v in tensors.items() if v is not None})
    return module


def in_precision(module: LightningModule, config: DictConfig) -> LightningModule:
    """float16 is as large as bfloat16, which CPUs support better."""
    precision = TrainerArguments.of(config.trainer).precision_name
    return module.to(torch.bfloat16) if precision in HALF else module


def loss_of(module: LightningModule, batch: object, config: DictConfig) -> Tensor:
    """The loss of a batch, in the run's precision."""
    return loss_in_precision(module, batch_in_precision(batch, config), config)


def batch_in_precision(batch: object, config: DictConfig) -> object:
    if TrainerArguments.of(config.trainer).precision_name not in HALF:
        return batch
    return tree_map_only(Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, batch)


def loss_in_precision(module: LightningModule, batch: object, config: DictConfig) -> Tensor:
    precision = TrainerArguments.of(config.trainer).precision_name
    with torch.autocast("cpu", torch.bfloat16) if precision in AUTOCAST else nullcontext():
        numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        output: Any = module.training_step(*((batch, 0) if numbered else (batch,)))
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss
