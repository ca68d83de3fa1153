"""Checkpoints of a split model in the one portable format: whole, and by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import move_data_to_device

from distdl.strategies.pipeline.place import Place

CPU = torch.device("cpu")


def merged(part: Mapping[str, Any], place: Place, group: dist.ProcessGroup) -> dict[str, Any]:
    """The parts of all stages in one, on the first stage of the first pipeline (else empty).

    All ranks of a pipeline must call it. Where stages have the same name, the first one's counts.
    """
    if place.replica > 0:  # the other pipelines hold the same
        return {}
    parts: list[Any] | None = [None] * place.stages if place.first else None
    dist.gather_object(move_data_to_device(dict(part), CPU), parts, group=group, group_dst=0)
    return {name: value for each in reversed(parts or []) for name, value in each.items()}


def ordered(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """In the order of `names`; what they do not name comes last."""
    first = {name: values[name] for name in names if name in values}
    return {**first, **values}


def named_state(
    state: Mapping[str, Any],
    names: Sequence[Sequence[str]],
    place: Place,
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """A whole optimizer's state, from those of its stages.

    Args:
        state: Of this stage's optimizer, by name.
        names: Of the parameters of the whole model, by group.
    """
    values = merged(state["state"], place, group)
    groups = [
        {**own, "params": list(every)}
        for own, every in zip(state["param_groups"], names, strict=True)
    ]
    every = [name for group_names in names for name in group_names]
    return {**state, "state": ordered(values, every), "param_groups": groups}
