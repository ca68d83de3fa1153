"""Checks during training: they raise where FSDP2 would silently give wrong results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from distdl.distributed import process_group
from distdl.util.errors import UserError

CALLS = 2  # the first update of a moving average may be a copy, which changes nothing


def refuse_second_order(unit: nn.Module) -> None:
    """Makes `create_graph=True` (a gradient penalty) raise a UserError.

    The second backward pass reads weights that FSDP2 frees at the end of the first one. Grad mode
    is on during a backward pass only with `create_graph=True`.
    """
    assert isinstance(unit, FSDPModule)
    state: Any = unit._get_fsdp_state()
    pre_backward = state._pre_backward

    def refusing(gradient: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise UserError.at(
                "strategy",
                what="create_graph=True (a gradient penalty) gives wrong gradients under fsdp",
                remedy="strategy=ddp",
                code="unsupported",
            )
        return pre_backward(gradient)

    state._pre_backward = refusing


def watch_weights(module: Any) -> None:  # noqa: ANN401 - a method of it is replaced
    """Makes `training_step` raise if its first calls change weights. Collective.

    Weights outside inner units are gathered during the step. A change would go to the gathered
    copy, which is then discarded.
    """
    slices: dict[str, Any] = dict(module.named_parameters())
    step = module.training_step
    calls = iter(range(CALLS))

    def changed() -> list[str]:
        # Weights of inner units are DTensors here: a change of their slices is kept.
        gathered = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if isinstance(slices[name], DTensor) and not isinstance(parameter, DTensor)
        ]
        differ = []
        for name, parameter in gathered:
            kept = slices[name]
            weights = parameter.detach()
            used: Any = distribute_tensor(
                weights, kept.device_mesh, kept.placements, src_data_rank=None
            )
            used = used.to_local()
            differ.append((used != kept.to_local().to(used.device)).any())  # offloaded weights
        flags = torch.stack(differ).tolist() if differ else []  # one device sync for all
        return [name for (name, _), flag in zip(gathered, flags, strict=True) if flag]

    @functools.wraps(step)
    def training_step(*args: object, **kwargs: object) -> object:
        output = step(*args, **kwargs)
        watched = process_group.gather(changed()) if next(calls, None) is not None else []
        if names := [name for each in watched for name in each]:
            raise UserError.at(
                "strategy",
                what=f"training_step changes weights ({names[0]}), which is lost under fsdp",
                remedy="change them in on_train_batch_end, in place, not by .data; or strategy=ddp",
                code="unsupported",
            )
        return output

    module.training_step = training_step


def show_arguments(wrapper: Callable[..., Any], method: Callable[..., Any]) -> None:
    """Lets a method that wraps a user's one, perhaps in several layers, show that one's arguments.

    Lightning passes `batch_idx`, `dataloader_idx` or `dataloader_iter` if it finds them there. It
    looks behind one `__wrapped__`, in the user's own decorators too; `inspect.signature`, behind
    all of them, and expects `self`.
    """
    function = getattr(method, "__func__", method)
    bound: Any = wrapper
    bound.__func__.__wrapped__ = getattr(function, "__wrapped__", function)
