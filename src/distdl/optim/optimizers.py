"""Builds optimizers and schedules from their config nodes."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer

from distdl.optim.averages import exchanges
from distdl.optim.budget import StepsLeft
from distdl.optim.learning_rates import OF_LAYERS, LayerRate, rate_of
from distdl.optim.parameter_groups import FACTOR, WITH_FALLBACK, parameter_groups
from distdl.optim.schedules import constant, warmup_step
from distdl.optim.schedules import rescale_schedule as rescale_schedule
from distdl.util.errors import Problem, UserError

# Keys of an optimizer node that are ours; all others are arguments of the optimizer's class.
OUR_OPTIMIZER_KEYS = (
    "_target_",
    "lr_scaling",
    "lr_reference_batch",
    "decay_norm_and_bias",
    *OF_LAYERS,
)
# Keys of a schedule node that tell Lightning when to step it; all others are arguments.
OUR_SCHEDULE_KEYS = ("_target_", "interval", "frequency", "monitor", "strict", "name")
LENGTHS = ("total_steps", "max_epochs")  # arguments of schedules that depend on the end
WITHOUT_END = (constant, warmup_step)  # whose rates do not, though they take them
# Keys of a parameter group that are null in a checkpoint: each run keeps its own values.
KERNELS = {"fused", "foreach"}


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
            "model",
            what="has no trainable parameter",
            remedy="unfreeze some parameters",
            code="incomplete",
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
    budget: StepsLeft | None = None,
) -> dict[str, Any]:
    """Builds a schedule as Lightning's `lr_scheduler` dict; {} for an empty node.

    A target that takes `steps_per_epoch`, `max_epochs`, `total_steps` or `budget` gets them, unless
    the node sets them. A schedule of ours, or one that takes `total_steps`, steps once per
    optimizer step; others step once per epoch. The node's `interval` overrides this.

    Args:
        config: `_target_`, arguments of the target, and Lightning's settings (interval, frequency,
            monitor, strict, name).
        steps_per_epoch: Optimizer steps (after accumulation) per epoch.
        max_epochs: Of the complete training.
        total_steps: Optimizer steps of the complete training, which may end within an epoch;
            infinity: unknown; None: the training ends with the last epoch.
        budget: `trainer.max_time`; None: there is none. A node that sets the length itself has a
            schedule of that length, whatever the time is.

    Raises:
        UserError: The target needs the length of the training, which is unknown, or which ends on
            a clock that it cannot follow.
    """
    config = _plain(config or {})
    if not config:
        return {}
    target = _target(config, "schedule", "schedule=cosine")
    taken = inspect.signature(target).parameters
    supplied: dict[str, object] = {
        "steps_per_epoch": steps_per_epoch,
        "max_epochs": max_epochs,
        "total_steps": steps_per_epoch * max_epochs if total_steps is None else total_steps,
    }
    lengths = {*LENGTHS} & taken.keys() - config.keys()
    follows = budget is not None and "budget" in taken and not {*LENGTHS} & config.keys()
    problem = clock_problem(config, target) if budget is not None else None
    if problem is not None:
        raise UserError(replace(problem, path="schedule"))
    if total_steps == math.inf and lengths and not follows and target is not constant:
        raise UserError.at(
            "schedule",
            what="depends on the length of the training, which is unknown",
            remedy="trainer.max_steps=STEPS, or schedule=constant",
            code="unreadable",
        )
    if follows:
        supplied["budget"] = budget
    arguments = {name: value for name, value in supplied.items() if name in taken}
    arguments |= {k: v for k, v in config.items() if k not in OUR_SCHEDULE_KEYS}
    ours = target.__module__.startswith("distdl.optim.")
    per_step = ours or "total_steps" in taken
    defaults = {"interval": "step" if per_step else "epoch", "frequency": 1}
    for_lightning = {k: v for k, v in config.items() if k in OUR_SCHEDULE_KEYS[1:]}
    return {"scheduler": target(optimizer, **arguments), **defaults, **for_lightning}


def clock_problem(config: Mapping[str, Any], target: Callable[..., Any]) -> Problem | None:
    """Why a schedule does not go with `trainer.max_time`: it gets the training's length, which the
    clock may cut short, and does not look at the clock.

    Args:
        config: The schedule's node.
        target: What its `_target_` names.
    """
    taken = inspect.signature(target).parameters
    lengths = [name for name in LENGTHS if name in taken and name not in config]
    if not lengths or "budget" in taken or target in WITHOUT_END:
        return None
    name = getattr(target, "__name__", "it")
    own = f"schedule.{lengths[0]}={lengths[0].rpartition('_')[2].upper()}"
    return Problem(
        "",
        what=(
            f"{name} takes the length of the training ({lengths[0]}), and cannot follow "
            "trainer.max_time, which may end the training earlier"
        ),
        remedy=f"schedule=cosine or linear, or {own}, or no trainer.max_time",
        code="conflict",
    )


def _target(config: Mapping[str, Any], node: str, remedy: str) -> Callable[..., Any]:
    if not config.get("_target_"):
        raise UserError.at(f"{node}._target_", what="is missing", remedy=remedy, code="missing-key")
    return get_object(config["_target_"])


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(config, DictConfig):
        return dict(config)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
