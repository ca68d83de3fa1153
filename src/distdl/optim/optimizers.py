"""Builds optimizers and schedules from their config nodes: learning rates, decay, schedules."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from distdl.optim.schedules import constant
from distdl.optim.schedules import rescale_schedule as rescale_schedule
from distdl.util.errors import UserError

# Keys of an optimizer node that are ours; all others are arguments of the optimizer's class.
OUR_OPTIMIZER_KEYS = ("_target_", "lr_scaling", "lr_reference_batch", "decay_norm_and_bias")
# Keys of a schedule node that tell Lightning when to step it; all others are arguments.
OUR_SCHEDULE_KEYS = ("_target_", "interval", "frequency", "monitor", "strict", "name")
# Keys of a parameter group that are null in a checkpoint: each run keeps its own values.
KERNELS = {"fused", "foreach"}

# _NormBase: batch norm in all its kinds (synchronised, lazy) and instance norm.
_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)
# timm's norm layers that are not subclasses of torch's.
_TIMM_NORMS = (
    "RmsNorm",
    "RmsNorm2d",
    "SimpleNorm",
    "SimpleNorm2d",
    "FrozenBatchNormAct2d",
    "FilterResponseNormTlu2d",
    "FilterResponseNormAct2d",
    "GlobalResponseNorm",
    "EvoNorm2dB0",
    "EvoNorm2dB1",
    "EvoNorm2dB2",
    "EvoNorm2dS0",
    "EvoNorm2dS1",
    "EvoNorm2dS2",
)


def scale_lr(lr: float, global_batch: int, rule: str, reference: int = 256) -> float:
    """Scales a learning rate from a global batch of `reference` images to `global_batch`.

    Args:
        rule: "linear" (Goyal et al. 2017), "sqrt" (Krizhevsky 2014, "One weird trick") or "none".

    Raises:
        UserError: For another rule.
    """
    if rule == "linear":
        return lr * global_batch / reference
    if rule == "sqrt":
        return lr * math.sqrt(global_batch / reference)
    if rule == "none":
        return lr
    remedy = "one of linear, sqrt, none"
    raise UserError.at("optimizer.lr_scaling", f"no rule {rule!r}", remedy, code="wrong-choice")


@dataclass(frozen=True)
class RateScaling:
    """How the rate of an optimizer node follows the global batch: see `scale_lr`."""

    rule: str = "none"
    reference: int = 256

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RateScaling:
        rule = config.get("lr_scaling", cls.rule)
        reference = config.get("lr_reference_batch", cls.reference)
        return cls(str(rule), int(reference))

    def rate(self, lr: float, global_batch: int) -> float:
        return scale_lr(lr, global_batch, self.rule, self.reference)


def rate_of(config: Mapping[str, Any], global_batch: int) -> float:
    """The scaled learning rate of an optimizer node, which must have an `lr`."""
    return RateScaling.of(config).rate(float(config["lr"]), global_batch)


def describe_lr(config: Mapping[str, Any], global_batch: int) -> str:
    """One line that explains the learning rate of an optimizer node."""
    config = _plain(config)
    if "lr" not in config:
        return "lr is the optimizer's default"
    lr = float(config["lr"])
    scaling = RateScaling.of(config)
    if scaling.rule == "none":
        return f"lr {lr:g} (not scaled by the global batch of {global_batch})"
    ratio = f"{global_batch}/{scaling.reference}"
    factor = f"sqrt({ratio})" if scaling.rule == "sqrt" else ratio
    rate = scaling.rate(lr, global_batch)
    return f"lr {lr:g} per {scaling.reference} images x {factor} ({scaling.rule}) = {rate:g}"


def parameter_groups(
    module: nn.Module, weight_decay: float | None, decay_norm_and_bias: bool = False
) -> list[dict[str, Any]]:
    """The trainable parameters, each once: at most two groups for an optimizer, decayed ones first.

    Parameters of normalisation layers and biases are not decayed (Goyal et al. 2017, section 5.3;
    He et al. 2019, "Bag of Tricks"), unless `decay_norm_and_bias`. Normalisation layers are found
    by their type, not their name. A `weight_decay` of None is the optimizer's default.
    """
    # Models with timm's layers have imported them already; other models need not wait for that.
    timm = sys.modules.get("timm.layers")
    norms = (*_NORMS, *(getattr(timm, name) for name in _TIMM_NORMS if hasattr(timm, name)))
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    seen: set[int] = set()
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            spare = isinstance(owner, norms) or _is_bias(owner, name)
            (spared if spare and not decay_norm_and_bias else decayed).append(parameter)
    first = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups = [{"params": decayed, **first}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _is_bias(owner: nn.Module, name: str) -> bool:
    # torch's attention and recurrent layers have several biases: in_proj_bias, bias_ih_l0.
    several = isinstance(owner, nn.MultiheadAttention | nn.RNNBase)
    return name == "bias" or (several and "bias" in name)


def build_optimizer(
    module: nn.Module, config: Mapping[str, Any], *, global_batch: int, fuse: bool = True
) -> Optimizer:
    """Builds an optimizer over `module`'s trainable parameters from an optimizer node.

    Each group also holds "reference_lr", the rate before scaling, for the schedules' warm-up.

    Args:
        config: `_target_`, lr, lr_scaling (default "none"), lr_reference_batch (256),
            decay_norm_and_bias (False), and arguments of the class.
        global_batch: Images per optimizer step, over all ranks and accumulated batches.
        fuse: If `fused` is null or absent in the node: True sets it where `can_fuse` allows; False
            leaves the choice to torch.

    Raises:
        UserError: When nothing is trainable, or the node names no class.
    """
    config = _plain(config)
    target = _target(config, "optimizer", "optimizer=sgd")
    arguments = {k: v for k, v in config.items() if k not in OUR_OPTIMIZER_KEYS}
    fused = arguments.pop("fused", None)
    groups = parameter_groups(
        module, arguments.get("weight_decay"), bool(config.get("decay_norm_and_bias", False))
    )
    if not groups:
        raise UserError.at(
            "model", "has no trainable parameter", "unfreeze some parameters", code="incomplete"
        )
    if "lr" in config:
        arguments["lr"] = rate_of(config, global_batch)
        for group in groups:
            group["reference_lr"] = float(config["lr"])
    if fused is not None:
        arguments["fused"] = fused
    elif fuse and can_fuse(target, groups) and not {"foreach", "differentiable"} & arguments.keys():
        arguments["fused"] = True
    optimizer = target(groups, **arguments)
    if "fused" in optimizer.defaults:
        optimizer.register_state_dict_post_hook(_without_kernels)
        optimizer.register_load_state_dict_pre_hook(_with_own_kernels)
        optimizer.register_load_state_dict_post_hook(_match_state_layout)
        optimizer.register_step_pre_hook(_match_gradient_layout)
    return optimizer


def can_fuse(target: Callable[..., Any], groups: list[dict[str, Any]]) -> bool:
    """Whether an optimizer has a fused kernel for all of these parameters.

    It computes the same formula, but rounds sums of products once less, so weights may differ in
    the last bit.
    """
    # DTensors of FSDP: torch has no sharding rule for SGD's fused step (2.15).
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    # On meta are the parameters of a pipeline's other stages: every stage must choose as one
    # process does, or the results differ in the last bit.
    return "fused" in inspect.signature(target).parameters and all(
        p.device.type in ("cpu", "cuda", "meta")
        and p.is_floating_point()
        and not isinstance(p, sharded)
        for group in groups
        for p in group["params"]
    )


def _without_kernels(optimizer: Optimizer, state: dict[str, Any]) -> None:
    # Not in a checkpoint: the choice depends on the device.
    for group in state["param_groups"]:
        group.update(dict.fromkeys(KERNELS & group.keys()))


def _with_own_kernels(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    groups = [dict(group) for group in state["param_groups"]]
    for saved, current in zip(groups, optimizer.param_groups, strict=False):
        saved.update({name: current[name] for name in KERNELS & current.keys()})
    return {**state, "param_groups": groups}


def _match_state_layout(optimizer: Optimizer) -> None:
    """Runs after loading, because state from FSDP or DeepSpeed is not channels_last."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = _like(parameter, value)


def _match_gradient_layout(optimizer: Optimizer, *_: object) -> None:
    """Runs before a step: gradients that autograd did not create may have another layout."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if parameter.grad is not None:
                parameter.grad = _like(parameter, parameter.grad)


def _like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in the layout of `parameter`; fused kernels on a CPU (torch 2.15) assume it."""
    if tensor.layout is not torch.strided or tensor.stride() == parameter.stride():
        return tensor
    sizes = zip(tensor.shape, tensor.stride(), parameter.stride(), strict=True)
    if all(one == other for size, one, other in sizes if size > 1):
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


def build_schedule(
    optimizer: Optimizer,
    config: Mapping[str, Any] | None,
    *,
    steps_per_epoch: int,
    max_epochs: int,
    total_steps: float | None = None,
) -> dict[str, Any]:
    """Builds a schedule as Lightning's `lr_scheduler` dict; {} for an empty node.

    A target that takes `steps_per_epoch`, `max_epochs` or `total_steps` gets them, unless the node
    sets them. A schedule of ours, or one that takes `total_steps`, steps once per optimizer step;
    others step once per epoch. The node's `interval` overrides this.

    Args:
        config: `_target_`, arguments of the target, and Lightning's settings (interval, frequency,
            monitor, strict, name).
        steps_per_epoch: Optimizer steps (after accumulation) per epoch.
        max_epochs: Of the complete training.
        total_steps: Optimizer steps of the complete training, which may end within an epoch;
            infinity: unknown; None: the training ends with the last epoch.

    Raises:
        UserError: The target needs the length of the training, which is unknown.
    """
    config = _plain(config or {})
    if not config:
        return {}
    target = _target(config, "schedule", "schedule=cosine")
    taken = inspect.signature(target).parameters
    supplied = {
        "steps_per_epoch": steps_per_epoch,
        "max_epochs": max_epochs,
        "total_steps": steps_per_epoch * max_epochs if total_steps is None else total_steps,
    }
    endless = {"max_epochs", "total_steps"} if total_steps == math.inf else set()
    if endless & taken.keys() - config.keys() and target is not constant:
        what = "depends on the length of the training, which is unknown"
        remedy = "trainer.max_steps=<optimizer steps>, or schedule=constant"
        raise UserError.at("schedule", what, remedy, code="unreadable")
    arguments = {name: value for name, value in supplied.items() if name in taken}
    arguments |= {k: v for k, v in config.items() if k not in OUR_SCHEDULE_KEYS}
    ours = target.__module__.startswith("distdl.optim.")
    per_step = ours or "total_steps" in taken
    defaults = {"interval": "step" if per_step else "epoch", "frequency": 1}
    for_lightning = {k: v for k, v in config.items() if k in OUR_SCHEDULE_KEYS[1:]}
    return {"scheduler": target(optimizer, **arguments), **defaults, **for_lightning}


def _target(config: Mapping[str, Any], node: str, remedy: str) -> Callable[..., Any]:
    if not config.get("_target_"):
        raise UserError.at(f"{node}._target_", "is missing", remedy, code="missing-key")
    return get_object(config["_target_"])


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(config, DictConfig):
        return dict(config)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
