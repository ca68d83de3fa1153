"""Optimizer state by parameter name, the form that every strategy writes and reads.

torch keys optimizer state by a parameter's position in the groups. Positions change if parameters
are split over stages, flattened or grouped differently; names do not. A checkpoint of distdl is
therefore one file in Lightning's layout. Its weights have the module's own names, and its optimizer
states are

    {"state": {name: {"momentum_buffer": full tensor, ...}},
     "param_groups": [{"lr": 0.1, ..., "params": [name, ...]}, ...]}

Files of distdl 0.1 are keyed by position. `to_names` and `to_indices` accept either form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MethodType
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer


def to_names(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """The state of `optimizer` with names instead of positions; tensors are not copied.

    Args:
        state: From `optimizer.state_dict()`, or already by name.
        optimizer: Holds the parameters that the state was written for, in the same order.
        module: The LightningModule, whose `named_parameters()` give the names.

    Raises:
        ValueError: The optimizer has other groups than the state.
    """
    return name_state(state, names_of(optimizer, module))


def to_indices(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """The state in the form that `optimizer.load_state_dict` takes.

    Args:
        state: By name, or already by position. It may hold more parameters than the optimizer (a
            pipeline stage has a share of them); the others are left out.

    Raises:
        ValueError: The state lacks a parameter of the optimizer.
    """
    return index_state(state, names_of(optimizer, module))


def names_of(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group. A parameter outside the module is
    named by its position: "group0.parameter3". A parameter that torch pruned keeps its name."""
    masks = {name for name, _ in module.named_buffers()}
    names = {}
    for name, parameter in module.named_parameters():
        before = name.removesuffix("_orig")
        names[id(parameter)] = before if f"{before}_mask" in masks else name
    return [
        [names.get(id(p), f"group{g}.parameter{i}") for i, p in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def is_named(state: Mapping[str, Any]) -> bool:
    """Whether a state is keyed by name; True for a state without parameters."""
    keys = [key for group in state.get("param_groups", ()) for key in group["params"]]
    return all(isinstance(key, str) for key in keys)


def name_state(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """`to_names` with known names, for optimizers that no longer hold the module's parameters."""
    if is_named(state):
        return dict(state)
    groups = state["param_groups"]
    expected = [len(group) for group in names]
    saved = [len(group["params"]) for group in groups]
    if expected != saved:
        what = f"the optimizer's groups hold {expected} parameters, and the checkpoint's {saved}"
        raise ValueError(what)
    keys = chain.from_iterable(group["params"] for group in groups)
    name_at = dict(zip(keys, chain.from_iterable(names), strict=True))
    return {
        **state,
        "state": {name_at.get(key, key): value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": list(each)} for group, each in zip(groups, names, strict=True)
        ],
    }


def index_state(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """`to_indices` with known names of the optimizer's parameters."""
    if not is_named(state):
        return dict(state)
    group_of = {name: group for group in state["param_groups"] for name in group["params"]}
    missing = [name for name in chain.from_iterable(names) if name not in group_of]
    if missing:
        raise ValueError(
            f"the checkpoint has no optimizer state for {len(missing)} of the parameters that are "
            f"trained, the first of which is {missing[0]}"
        )
    groups = []
    values = {}
    position = 0
    for number, members in enumerate(names):
        # A pipeline stage may have no parameter of a group: identify the group by its position.
        kept = group_of[members[0]] if members else state["param_groups"][number]
        groups.append({**kept, "params": list(range(position, position + len(members)))})
        for name in members:
            if name in state["state"]:
                values[position] = state["state"][name]
            position += 1
    return {**state, "state": values, "param_groups": groups}


def add_groups(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> None:
    """Adds the groups that the module had added to its optimizer before the checkpoint."""
    parameters = dict(module.named_parameters())
    for group in state["param_groups"][len(optimizer.param_groups) :] if is_named(state) else ():
        optimizer.add_param_group({"params": [parameters[name] for name in group["params"]]})


def use_names(strategy: Strategy) -> None:
    """Makes a strategy of Lightning's write and read optimizer states by name. One that overrides
    these methods is left alone: ours already use names, and others keep their state elsewhere."""
    kind = type(strategy)
    if (
        kind.optimizer_state is not Strategy.optimizer_state
        or kind.load_optimizer_state_dict is not Strategy.load_optimizer_state_dict
    ):
        return

    def optimizer_state(self: Strategy, optimizer: Optimizer) -> dict[str, Any]:
        inner = getattr(optimizer, "_optimizer", optimizer)  # Lightning wraps it
        assert self.lightning_module is not None
        return to_names(Strategy.optimizer_state(self, optimizer), inner, self.lightning_module)

    def load_optimizer_state_dict(self: Strategy, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        states = []
        for state, optimizer in zip(checkpoint["optimizer_states"], self.optimizers, strict=True):
            add_groups(state, optimizer, self.lightning_module)
            states.append(to_indices(state, optimizer, self.lightning_module))
        Strategy.load_optimizer_state_dict(self, {**checkpoint, "optimizer_states": states})

    strategy.optimizer_state = MethodType(optimizer_state, strategy)  # type: ignore[method-assign]
    strategy.load_optimizer_state_dict = MethodType(  # type: ignore[method-assign]
        load_optimizer_state_dict, strategy
    )
