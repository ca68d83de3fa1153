"""A model and a batch for a step that is only measured: without memory where that is possible."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from distdl.build import make
from distdl.config import plain
from distdl.errors import Problem, UserError
from distdl.meta import WEIGHTS

# Samples that are loaded; fake ones fill the batch.
SAMPLES = 4
AUTOCAST = ("16-mixed", "bf16-mixed", "16", "bf16", "transformer-engine-float16")
HALF = ("16-true", "bf16-true", "transformer-engine")


def without_memory(node: DictConfig) -> Any:
    """The module on the meta device, if it can be built there; else as it is, on the CPU."""
    bare = _stripped(plain(node))
    bare.pop("compile", None)
    try:
        with torch.device("meta"):
            return make(bare)
    except Exception:  # timm, for one, reads values while it builds
        return make(bare)


def _stripped(value: Any) -> Any:
    """Without what would download weights."""
    if isinstance(value, dict):
        return {k: _stripped(v) for k, v in value.items() if k not in WEIGHTS}
    return value


def as_fake(module: Any) -> Any:
    """Puts fake tensors on a fake CPU into the place of all parameters and buffers."""
    fakes: dict[int, Tensor] = {}
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:  # shared ones stay shared
                    empty = torch.empty_strided(
                        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
                    )
                    is_parameter = isinstance(tensor, nn.Parameter)
                    fake = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    fakes[id(tensor)] = fake
                own[name] = fakes[id(tensor)]
    return module


def as_fake_batch(batch: Any, samples: int, size: int) -> Any:
    """A fake batch of `size` samples with the shapes and layouts of a real one of `samples`."""

    def stretch(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if shape and shape[0] == samples:
            shape[0] = size
        return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    return tree_map_only(Tensor, stretch, batch)


def a_batch(config: DictConfig) -> tuple[int, Any]:
    """A few samples, as the training step gets them, and how many they are."""
    from distdl.callbacks.metrics import batch_size_of

    node = plain(config.get("data")) if config.get("data") else None
    if node is not None and "batch_size" in node:
        node["batch_size"] = min(SAMPLES, int(node["batch_size"]))
    if node is not None and "num_workers" in node:
        node["num_workers"] = 0
    try:
        source = make(node) if node is not None else make(config.model)
        if node is not None:
            source.setup("fit")
        batch = next(iter(source.train_dataloader()))
        batch = source.on_before_batch_transfer(batch, 0)
        batch = source.on_after_batch_transfer(batch, 0)
    except Exception as error:
        raise UserError(
            Problem(
                "data",
                f"no batch can be loaded here: {type(error).__name__}: {error}",
                "plan with random images of the same size: data=synthetic data.image_size=...",
            )
        ) from error
    return batch_size_of(batch) or 1, batch


def precision_of(config: DictConfig) -> str:
    return str(config.trainer.get("precision") or "32-true")


def in_precision(module: Any, config: DictConfig) -> Any:
    """float16 is as large as bfloat16, which CPUs know better."""
    return module.to(torch.bfloat16) if precision_of(config) in HALF else module
