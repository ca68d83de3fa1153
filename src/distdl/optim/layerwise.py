"""Optimizers that are more than a formula for each number: they compute something of a whole layer
(a norm, a matrix product), or of all layers at once. A strategy that shows them only a part of a
layer, or some of the layers, would train otherwise than one device does, without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from distdl.util.errors import Problem, UserError

# By the names of their classes, in torch, timm and elsewhere. A layer's norm: LARS, LAMB, NovoGrad,
# MARS; its direction: AdamP, SGDP; its rows and columns: Adafactor, Shampoo; matrix products: Muon.
OF_A_LAYER = {
    "Adafactor",
    "AdafactorBigVision",
    "Adahessian",
    "AdamP",
    "Kron",
    "LAMB",
    "LARS",
    "LBFGS",
    "Lamb",
    "Lars",
    "Mars",
    "Muon",
    "NovoGrad",
    "NvNovoGrad",
    "SGDP",
    "SOAP",
    "Shampoo",
}
# Those of them that compute the same where a layer is a DTensor, divided over two dimensions of a
# mesh; others fail there in torch 2.15 (AdamP, SGDP, NvNovoGrad, Adafactor), or were not tried.
OF_DTENSORS = {"LAMB", "LARS", "Lamb", "Lars", "Muon"}
CLIPS_ALL = {"LAMB", "Lamb"}  # by `max_grad_norm`, the norm of all gradients


def refuse_parts(name: str, strategy: str) -> Iterator[Problem]:
    """For a strategy that divides layers into flat parts, as ZeRO does."""
    if name in OF_A_LAYER:
        yield Problem(
            "",
            what=(
                f"{name} computes something of whole layers, and {strategy} shows it parts of them"
            ),
            remedy="strategy=ddp or strategy=fsdp, or an optimizer such as adamw or sgd",
            code="unsupported",
        )


def refuse_some_layers(name: str, most: float | None) -> Iterator[Problem]:
    """For a strategy that gives each rank some of the layers. `most`: its max_grad_norm."""
    if name == "LBFGS":
        yield Problem(
            "",
            what="LBFGS needs all layers at once, and each stage has some",
            remedy="strategy=ddp, or another optimizer",
            code="unsupported",
        )
    if name in CLIPS_ALL and most:
        yield Problem(
            "",
            what=f"{name} clips the norm of all gradients, of which each stage has some",
            remedy=f"optimizer.max_grad_norm=null trainer.gradient_clip_val={most}",
            code="unsupported",
        )


def refuse_slices(name: str, most: float | None) -> Iterator[Problem]:
    """For a strategy whose layers are DTensors on several meshes. `most`: its max_grad_norm."""
    if name in OF_A_LAYER - OF_DTENSORS:
        yield Problem(
            "",
            what=f"{name} computes something of whole layers, which tensor parallelism divides",
            remedy="an optimizer such as adamw, sgd or muon",
            code="unsupported",
        )
    if name in CLIPS_ALL and most:
        yield Problem(
            "",
            what=f"{name} clips the norm of all gradients, which lie on several meshes",
            remedy=f"optimizer.max_grad_norm=null trainer.gradient_clip_val={most}",
            code="unsupported",
        )


def of_config(config: Mapping[str, Any]) -> tuple[str, float | None]:
    """The name of a config's optimizer, and its max_grad_norm (1 by default)."""
    node = config.get("optimizer") or {}
    return str(node.get("_target_", "")).rpartition(".")[2], node.get("max_grad_norm", 1.0)


def of_optimizer(optimizer: Optimizer) -> tuple[str, float | None]:
    """As `of_config`, for one that a module made itself."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    return type(optimizer).__name__, group.get("max_grad_norm")


def refuse_own(problems: Iterable[Problem]) -> None:
    """For an optimizer that a module made itself, which no check of a config has seen.

    Raises:
        UserError: There are problems.
    """
    found = [replace(problem, path="configure_optimizers") for problem in problems]
    if found:
        raise UserError(*found)
