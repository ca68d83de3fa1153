"""Builds optimizers and schedules from their config nodes: learning rates, decay, schedules."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from distdl.optim.averages import exchanges
from distdl.optim.schedules import constant
from distdl.optim.schedules import rescale_schedule as rescale_schedule
from distdl.util.errors import UserError

OF_LAYERS = ("layer_decay", "backbone_lr")  # those that give layers a rate of their own
# Keys of an optimizer node that are ours; all others are arguments of the optimizer's class.
OUR_OPTIMIZER_KEYS = (
    "_target_",
    "lr_scaling",
    "lr_reference_batch",
    "decay_norm_and_bias",
    *OF_LAYERS,
)
# What activation checkpointing and torch.compile add to the names of modules.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
# Optimizers for matrices, with another one for all else, which a group chooses by this key.
WITH_FALLBACK = ("timm.optim.Muon", "timm.optim.muon.Muon")
FALLBACK = "use_fallback"
LAYER = "layer"  # of a parameter group: the layer whose rate it has
FACTOR = "lr_factor"  # of a parameter group: that rate, as a factor of the optimizer's
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


@dataclass(frozen=True)
class LayerRate:
    """Parameters with a rate of their own.

    Args:
        name: Of the layer, for messages and metrics.
        factor: Of the optimizer's rate.
        parameters: Their names in the module.
    """

    name: str
    factor: float
    parameters: frozenset[str]


def layer_rates(
    layers: Mapping[str, Sequence[str]], heads: Sequence[str], config: Mapping[str, Any]
) -> list[LayerRate]:
    """The rates that `layer_decay` or `backbone_lr` of an optimizer node gives, the highest first;
    empty without either.

    The last layer has the full rate, and each one before it `layer_decay` times that of the next
    (Howard and Ruder 2018; Clark et al. 2020, "ELECTRA"; Bao et al. 2022, "BEiT"). With
    `backbone_lr` all but the head has that rate.

    Args:
        layers: The names of parameters by layer, in the order of forward.
        heads: The layers that are the head, of those.

    Raises:
        UserError: There is one layer alone, or no known head.
    """
    decay = config.get("layer_decay")
    backbone = config.get("backbone_lr")
    if decay is not None and len(layers) < 2:
        what = "the layers of the model and their order are not known"
        remedy = "optimizer.layer_decay=null, or a method pipeline_blocks() of the module"
        raise UserError.at("optimizer.layer_decay", what, remedy, code="unsupported")
    if decay is not None:
        order = [(name, frozenset(layers[name])) for name in reversed([*layers])]
        return [LayerRate(name, decay**i, names) for i, (name, names) in enumerate(order)]
    if backbone is None:
        return []
    first = frozenset(name for layer in heads for name in layers.get(layer, ()))
    rest = frozenset(name for names in layers.values() for name in names) - first
    if not first or not rest:
        what = "it is not known which part of the model is the head"
        remedy = "optimizer.layer_decay, which needs no head, or a module with a part `backbone`"
        raise UserError.at("optimizer.backbone_lr", what, remedy, code="unsupported")
    factor = float(backbone) / float(config["lr"])
    return [LayerRate("head", 1.0, first), LayerRate("backbone", factor, rest)]


def describe_groups(groups: Sequence[Mapping[str, Any]]) -> str:
    """The rates of layers, as they are before the schedule; "" if all groups have the same."""
    rates: dict[str, float] = {}
    for group in groups:
        if LAYER in group:
            rates[group[LAYER]] = float(group.get("initial_lr", group["lr"]))
    return ", ".join(f"{layer} {rate:.3g}" for layer, rate in rates.items())


def parameter_groups(
    module: nn.Module,
    weight_decay: float | None,
    decay_norm_and_bias: bool = False,
    rates: Sequence[LayerRate] = (),
    later: Collection[str] = (),
    heads: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """The parameters that are trained, each once: at most two groups for an optimizer, or for each
    of `rates`; decayed ones first. With `heads`, the decayed ones are two groups.

    Parameters of normalisation layers and biases are not decayed (Goyal et al. 2017, section 5.3;
    He et al. 2019, "Bag of Tricks"), unless `decay_norm_and_bias`. Normalisation layers are found
    by their type, not their name. A `weight_decay` of None is the optimizer's default.

    Args:
        later: Names of frozen parameters that will be trained.
        heads: For an optimizer of matrices (`WITH_FALLBACK`): the names of the head's parameters.
            It gets the weights of all other linear layers and convolutions; the head, embeddings,
            norms, biases and parameters of other layers get its fallback (Jordan et al. 2024).
    """
    rate_of_name = {name: rate for rate in rates for name in rate.parameters}
    full = LayerRate("others", 1.0, frozenset())
    together: dict[LayerRate, Members] = {rate: Members() for rate in (*rates, full)}
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            whole = plain_name(f"{path}.{name}" if path else name)
            if id(parameter) in seen or not (parameter.requires_grad or whole in later):
                continue
            seen.add(id(parameter))
            spare = is_norm(owner) or _is_bias(owner, name)
            members = together[rate_of_name.get(whole, full)]
            if spare and not decay_norm_and_bias:
                members.spared.append(parameter)
            elif heads is None or (_is_matrix(owner, name) and whole not in heads):
                members.decayed.append(parameter)
            else:
                members.others.append(parameter)
    first = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups: list[dict[str, Any]] = []
    fallback = {} if heads is None else {FALLBACK: True}
    for rate, members in together.items():
        layer = {LAYER: rate.name, FACTOR: rate.factor} if rates else {}
        groups.append({"params": members.decayed, **first, **layer})
        groups.append({"params": members.others, **first, **layer, **fallback})
        groups.append({"params": members.spared, "weight_decay": 0.0, **layer, **fallback})
    return [group for group in groups if group["params"]]


@dataclass(frozen=True)
class Members:
    """Parameters of one rate: decayed ones, decayed ones of the fallback, and spared ones."""

    decayed: list[nn.Parameter] = field(default_factory=list)
    others: list[nn.Parameter] = field(default_factory=list)
    spared: list[nn.Parameter] = field(default_factory=list)


def plain_name(name: str) -> str:
    """The name of a module or parameter as it is where nothing wraps modules."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_norm(module: nn.Module) -> bool:
    """Whether it is a normalisation layer, by its type."""
    # Models with timm's layers have imported them already; other models need not wait for that.
    timm = sys.modules.get("timm.layers")
    norms = (*_NORMS, *(getattr(timm, name) for name in _TIMM_NORMS if hasattr(timm, name)))
    return isinstance(module, norms)


def _is_bias(owner: nn.Module, name: str) -> bool:
    # torch's attention and recurrent layers have several biases: in_proj_bias, bias_ih_l0.
    several = isinstance(owner, nn.MultiheadAttention | nn.RNNBase)
    return name == "bias" or (several and "bias" in name)


def _is_matrix(owner: nn.Module, name: str) -> bool:
    """Whether a parameter is multiplied with features: the weight of a linear layer or of a
    convolution, or those of torch's attention."""
    if isinstance(owner, nn.MultiheadAttention):
        return name.endswith("_proj_weight")
    return name == "weight" and isinstance(owner, nn.Linear | _ConvNd)


def build_optimizer(
    module: nn.Module,
    config: Mapping[str, Any],
    *,
    global_batch: int,
    fuse: bool = True,
    rates: Sequence[LayerRate] = (),
    later: Collection[str] = (),
    heads: Collection[str] = (),
) -> Optimizer:
    """Builds an optimizer over `module`'s trainable parameters from an optimizer node.

    Each group also holds "reference_lr", the rate before scaling, for the schedules' warm-up.

    Args:
        config: `_target_`, lr, lr_scaling (default "none"), lr_reference_batch (256),
            decay_norm_and_bias (False), and arguments of the class.
        global_batch: Images per optimizer step, over all ranks and accumulated batches.
        rates: Of layers with a rate of their own.
        later: Names of frozen parameters that will be trained.
        heads: Names of the head's parameters, for an optimizer with a fallback.
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
        module,
        arguments.get("weight_decay"),
        bool(config.get("decay_norm_and_bias", False)),
        rates,
        later,
        heads if config["_target_"] in WITH_FALLBACK else None,
    )
    if not groups:
        raise UserError.at(
            "model", "has no trainable parameter", "unfreeze some parameters", code="incomplete"
        )
    if "lr" in config:
        arguments["lr"] = rate_of(config, global_batch)
        for group in groups:
            factor = group.pop(FACTOR, 1.0)
            group["reference_lr"] = float(config["lr"]) * factor
            if factor != 1.0:
                group["lr"] = arguments["lr"] * factor
    if fused is not None:
        arguments["fused"] = fused
    elif fuse and can_fuse(target, groups) and not {"foreach", "differentiable"} & arguments.keys():
        arguments["fused"] = True
    optimizer = target(groups, **arguments)
    if KERNELS & optimizer.defaults.keys():
        optimizer.register_state_dict_post_hook(_without_kernels)
        optimizer.register_load_state_dict_pre_hook(_with_own_kernels)
    if exchanges(optimizer):
        optimizer.train()
        optimizer.state.clear()  # it has looked for states, and left empty ones
    if "fused" in optimizer.defaults:
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
