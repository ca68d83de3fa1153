"""Optimizers that train at one point and keep other weights for use, an average: schedule-free ones
(Defazio et al. 2024, "The Road Less Scheduled", https://arxiv.org/abs/2405.15682).

Their `eval()` puts the average into the place of the weights, and their `train()` computes the
weights again, which rounds. Here the weights themselves are kept, and come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from distdl.util.errors import Problem

BEHIND = "y"  # in a parameter's state, while its average is in its place: what is trained
# Each has all of a weight, or a slice of it and of its state.
CARRY = ("auto", "single", "SingleDeviceStrategy", "DDPStrategy", "PipelineStrategy")
CARRIES_SLICES = "distdl.strategies.FSDPStrategy"
EVEN = ("", "distdl.optim.constant", "distdl.optim.schedules.constant")


def exchanges(optimizer: object) -> bool:
    """Whether an optimizer, or its class, exchanges weights for their average."""
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))


@torch.no_grad()
def to_average(optimizer: Optimizer) -> None:
    """Puts the average into the place of the weights, which the state keeps."""
    for parameter, state in _stepped(optimizer):
        if BEHIND not in state:
            state[BEHIND] = parameter.detach().clone()
    switched: Any = optimizer
    switched.eval()


@torch.no_grad()
def to_training(optimizer: Optimizer) -> None:
    """Puts the weights back; also after a checkpoint of the exchanged state was loaded."""
    switched: Any = optimizer
    switched.train()
    for parameter, state in _stepped(optimizer):
        if BEHIND in state:
            parameter.copy_(state.pop(BEHIND))


def _stepped(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if state := optimizer.state.get(parameter):
                yield parameter, state


def norms_of(module: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms by name whose running statistics are used where the average is."""
    return {
        name: norm
        for name, norm in module.named_modules()
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None
    }


def refused(name: str, config: Mapping[str, Any], module: nn.Module | None) -> Iterable[Problem]:
    """What does not go with such an optimizer.

    Args:
        name: Of its class.
        config: The run's, composed.
        module: The model, on `meta`; None: unknown.

    Yields:
        Problems, whose paths are relative to the optimizer's node.
    """
    schedule = str((config.get("schedule") or {}).get("_target_") or "")
    if schedule not in EVEN:
        yield Problem(
            "",
            what=f"{name} averages the weights instead of lowering the rate, as {schedule} does",
            remedy="schedule=constant, also with a warm-up",
            code="conflict",
        )
    for key, callback in (config.get("callbacks") or {}).items():
        if str((callback or {}).get("_target_", "")).endswith("WeightAveraging"):
            yield Problem(
                "",
                what=f"callbacks.{key} would average weights that {name} has averaged",
                remedy=f"leave it out: ~callbacks.{key}",
                code="conflict",
            )
    if (config.get("model") or {}).get("unfreeze_at") is not None:
        yield Problem(
            "",
            what=(
                f"what model.unfreeze_at trains later would enter an average of {name} that is old"
            ),
            remedy="model.unfreeze_at=null, or another optimizer",
            code="conflict",
        )
    yield from _refused_strategy(name, config.get("strategy") or {}, module)


def _refused_strategy(
    name: str, node: Mapping[str, Any], module: nn.Module | None
) -> Iterator[Problem]:
    target = str(node.get("_target_") or "")
    kind = target.rpartition(".")[2]
    remedy = "strategy=ddp or strategy=fsdp, or another optimizer"
    if kind == "LocalSGDStrategy" or node.get("comm_hook") == "post_local_sgd":
        yield Problem(
            "",
            what=(
                "ranks would average their weights, "
                f"and not those of which {name} keeps the average"
            ),
            remedy=remedy,
            code="unsupported",
        )
    elif kind not in CARRY and target not in ("", CARRIES_SLICES):
        yield Problem(
            "",
            what=(
                f"{name} exchanges the weights for a validation, and {kind} may hold copies of them"
            ),
            remedy=remedy,
            code="unsupported",
        )
    elif kind == "PipelineStrategy" and module is not None and norms_of(module):
        yield Problem(
            "",
            what=f"{name} needs batch norm's statistics of averages, and no pipeline computes them",
            remedy=f"model.norm=group, or {remedy}",
            code="unsupported",
        )
