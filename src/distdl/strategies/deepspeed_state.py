"""ZeRO's flat partitions <-> full tensors by parameter name.

ZeRO flattens the parameters of a group, cuts the result into one partition per rank and gives each
rank's optimizer its partition. So each rank has a fragment of a parameter (or nothing) in a flat
tensor, and the same fragment of the momentum in a flat momentum tensor (Rajbhandari et al. 2020,
"ZeRO", section 5; `deepspeed/runtime/zero/stage_1_and_2.py` and `stage3.py`).

DeepSpeed's own `safe_get_full_optimizer_state` and `safe_set_...` need a first step, and in stage 3
slice past the end of a parameter whose size is not a multiple of the world size (0.19).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distdl.checkpoint import portable
from distdl.distributed import process_group
from distdl.optim.optimizers import KERNELS
from distdl.strategies.sharing import on_host
from distdl.util.errors import UserError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# Names of the parameters by group, as they were before ZeRO flattened them.
Names = Sequence[Sequence[str]]


@dataclass
class Fragment:
    """This rank's part of one parameter, inside one flat partition."""

    flat: torch.Tensor | None = None  # the float32 partition; None: this rank has no part
    at: int = 0  # offset in `flat`
    start: int = 0  # offset in the flattened parameter
    count: int = 0  # elements


def is_sharded(engine: DeepSpeedEngine) -> bool:
    """Whether ZeRO has flattened the parameters; stage 0 keeps the torch optimizer."""
    return not isinstance(engine.optimizer, Optimizer)


class WithAllGroups:
    """An optimizer as its schedule sees it, with the groups that the optimizer has lost."""

    def __init__(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> object:
        return getattr(self._optimizer, name)


def set_aside_frozen(optimizer: Optimizer, schedule: object) -> list[dict[str, Any]]:
    """Takes groups out of which nothing is trained, since ZeRO cannot flatten nothing. A schedule
    goes on to set their rates, with which they are trained later. Returns all groups; empty if none
    was taken out."""
    groups = [*optimizer.param_groups]
    trained = [group for group in groups if any(p.requires_grad for p in group["params"])]
    if len(trained) == len(groups):
        return []
    optimizer.param_groups[:] = trained
    for each in _schedules_in(schedule):
        each.optimizer = WithAllGroups(optimizer, groups)
    return groups


def _schedules_in(schedule: object) -> Iterator[Any]:
    """A schedule, and those that it is made of (SequentialLR, ChainedScheduler)."""
    if schedule is not None:
        yield schedule
    for each in getattr(schedule, "_schedulers", ()):
        yield from _schedules_in(each)


def fragment(engine: DeepSpeedEngine, parameter: nn.Parameter) -> Fragment:
    """Where this rank keeps its part of a parameter; of a frozen one it has none.

    Raises:
        UserError: DeepSpeed keeps the parameter in a form that distdl cannot read.
    """
    zero = engine.optimizer
    if not parameter.requires_grad:
        return Fragment()
    if hasattr(parameter, "ds_id"):
        group, at, size = zero.grad_position[zero.get_param_id(parameter)]
        if zero._swappable_optimizer_subgroup(group):
            raise UserError.at(
                "strategy",
                what="optimizer state on NVMe cannot be gathered into a file",
                remedy="checkpoint.sharded=true",
                code="unsupported",
            )
        start = size * dist.get_rank()
        # The last partitions of a parameter are padded.
        count = max(0, min(size, parameter.ds_numel - start))  # type: ignore[attr-defined]
        return Fragment(zero.fp32_partitioned_groups_flat[group], at, start, count)
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return Fragment()
    flats = getattr(zero, "single_partition_of_fp32_groups", None)
    if flats is None:
        raise UserError.at(
            "strategy",
            what=f"DeepSpeed's {type(zero).__name__} cannot be gathered into a file",
            remedy="checkpoint.sharded=true, or a ZeRO stage from 1 to 3",
            code="unsupported",
        )
    flat, full = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Fragment(flats[mapping.param_group_index], flat.start, full.start, flat.numel)


def gathered(
    parameter: nn.Parameter, part: Fragment, flat: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """The full tensor, from each rank's part of it in `flat`. Collective."""
    shape = getattr(parameter, "ds_shape", parameter.shape)
    full = torch.zeros(shape.numel(), dtype=torch.float32, device=device)
    if flat is not None and part.count:
        full[part.start : part.start + part.count] = flat[part.at : part.at + part.count].to(device)
    if process_group.world_size() > 1:
        dist.all_reduce(full)
    return full.view(shape)


def weights(
    engine: DeepSpeedEngine, module: nn.Module, device: torch.device, keep: bool
) -> dict[str, Any]:
    """The full weights and buffers by name, on ranks with `keep`. Collective."""
    import deepspeed

    full_weights: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and value.requires_grad and is_sharded(engine):
            part = fragment(engine, value)
            full = gathered(value, part, part.flat, device)
        elif hasattr(value, "ds_id"):  # a frozen parameter in stage 3
            with deepspeed.zero.GatheredParameters([value]):
                full = value.detach().clone()
        else:
            full = value
        full_weights[name] = on_host(full) if keep else None
    return full_weights


def optimizer_state(
    engine: DeepSpeedEngine,
    module: nn.Module,
    names: Names,
    groups: Sequence[Mapping[str, Any]],
    device: torch.device,
    keep: bool,
) -> dict[str, Any]:
    """The optimizer's state in the form of `checkpoint.portable`, if `keep`. Collective.

    Args:
        groups: Of the optimizer, also those that were set aside; empty if none was.
    """
    if not is_sharded(engine):
        return portable.name_state(engine.optimizer.state_dict(), names)
    base: Optimizer = engine.optimizer.optimizer
    parameters = dict(module.named_parameters())
    state: dict[str, Any] = {}
    for name in itertools.chain.from_iterable(names):
        part = fragment(engine, parameters[name])
        held = base.state.get(part.flat, {}) if part.flat is not None else {}
        entry = {
            key: gathered(parameters[name], part, held.get(key), device) if is_flat else value
            for key, is_flat, value in state_entries(held, part.flat)
        }
        if keep and entry:
            state[name] = {key: on_host(full) for key, full in entry.items()}
    named = [
        {**group, **dict.fromkeys(KERNELS & group.keys()), "params": list(group_names)}
        for group, group_names in zip(groups or base.param_groups, names, strict=True)
    ]
    return {"state": state, "param_groups": named}


def state_entries(
    held: Mapping[str, Any], flat: torch.Tensor | None
) -> Iterator[tuple[str, bool, Any]]:
    """Each key of a parameter's state, whether it has an element per weight, and if not, its value.

    Ranks without a part of the parameter get the same keys as the others. Collective.
    """
    entries = []
    for key, value in held.items():
        is_flat = isinstance(value, torch.Tensor) and flat is not None and value.shape == flat.shape
        entries.append((key, is_flat, None if is_flat else on_host(value)))
    yield from max(process_group.gather(entries), key=len)


def load_optimizer_state(
    engine: DeepSpeedEngine,
    module: nn.Module,
    names: Names,
    groups: Sequence[dict[str, Any]],
    state: Mapping[str, Any],
) -> None:
    """Puts a portable (or position-keyed) state into ZeRO's partitions. `groups` are those of
    `optimizer_state`.

    Raises:
        ValueError: The state does not fit the optimizer.
    """
    named = portable.name_state(state, names)
    indexed = portable.index_state(named, names)  # raises if a parameter is missing
    if not is_sharded(engine):
        engine.optimizer.load_state_dict(indexed)
        return
    base: Optimizer = engine.optimizer.optimizer
    for group, saved in zip(groups or base.param_groups, indexed["param_groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k not in {"params", *KERNELS}})
    parameters = dict(module.named_parameters())
    for name in itertools.chain.from_iterable(names):
        part = fragment(engine, parameters[name])
        if part.flat is None:
            continue
        held = base.state[part.flat]
        for key, value in named["state"].get(name, {}).items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                held[key] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            flat = held.setdefault(key, torch.zeros_like(part.flat))
            piece = value.reshape(-1)[part.start : part.start + part.count]
            flat[part.at : part.at + part.count] = piece.to(flat.device)


def load_masters(
    engine: DeepSpeedEngine, module: nn.Module, weights: Mapping[str, torch.Tensor]
) -> None:
    """Sets the float32 master weights of an engine that trains in 16 bits."""
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad and n in weights}
    for name, parameter in trained.items() if is_sharded(engine) else ():
        part = fragment(engine, parameter)
        if part.flat is not None:
            piece = weights[name].reshape(-1)[part.start : part.start + part.count]
            part.flat.data[part.at : part.at + part.count] = piece.to(part.flat)
