"""Splits a network into a chain of blocks, for `strategy=pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Argument
from torch.nn import functional as F

from distdl.util.errors import UserError

# (dotted name, module); the name is None for a step without one, such as `torch.flatten`.
NamedBlock = tuple[str | None, nn.Module]


def blocks_of(network: nn.Module) -> list[NamedBlock]:
    """The blocks of a network: called one after the other, they compute its `forward`.

    If the network has a method `pipeline_blocks()`, its result is used. Otherwise the network is
    traced (`torch.fx`): each `nn.Sequential` is opened, any other module is a block, and a call
    between modules becomes a block without a name. This covers ResNet, VGG, DenseNet, ConvNeXt,
    EfficientNet and other chains, but no branches outside the blocks (a ViT's class token).

    Raises:
        UserError: The network is not such a chain; the error says where it fails.
    """
    stated: Any = getattr(network, "pipeline_blocks", None)
    if stated is not None:
        return list(stated())
    tracer = _Tracer()
    try:
        graph = tracer.trace(network)
    except Exception as error:  # the user's forward runs, with stand-ins for tensors
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise _no_chain(network, f"its forward cannot be traced: {first}") from error
    return _chain(network, graph)


def _no_chain(network: nn.Module, why: str) -> UserError:
    remedy = "give it a method pipeline_blocks() that returns [(name, module), ...] in the order "
    return UserError.at(
        "model",
        what=f"{type(network).__name__} cannot be divided into a chain of blocks: {why}",
        remedy=f"{remedy}of forward, or use another strategy",
        code="indivisible",
    )


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return type(module).forward is not nn.Sequential.forward


def _chain(network: nn.Module, graph: fx.Graph) -> list[NamedBlock]:
    blocks: list[NamedBlock] = []
    seen: set[str] = set()
    before: fx.Node | None = None
    for node in graph.nodes:
        # `forward` may have further arguments, if it does not use them.
        if node.op == "placeholder" and (before is None or not node.users):
            before = before or node
            continue
        ends = node.op == "output"
        if before is None or node.all_input_nodes != [before] or (ends and node.args != (before,)):
            raise _no_chain(network, f"{node.name} needs more than the output of the step before")
        before = node
        if node.op == "call_module":
            name = str(node.target)
            if len(node.args) != 1 or node.kwargs:
                raise _no_chain(network, f"{name} is called with further arguments")
            module = network.get_submodule(name)
            if name in seen and next(module.parameters(), None) is not None:
                raise _no_chain(network, f"{name} is used twice")
            blocks.append((None if name in seen else name, module))
            seen.add(name)
        elif not ends:
            blocks.append((None, _step(network, node)))
    return blocks


def _step(network: nn.Module, node: fx.Node) -> nn.Module:
    """A call between two modules, as a module."""
    if node.target is F.dropout:
        # Tracing fixes the value of `training`, but it must follow train() and eval().
        rate = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        return nn.Dropout(float(rate))  # type: ignore[arg-type]
    if "training" in node.kwargs or node.op not in ("call_function", "call_method"):
        raise _no_chain(network, f"{node.name} is not a block")
    return Call(node.target, node.args[1:], node.kwargs)


class Call(nn.Module):
    """Calls a function or a tensor method with fixed arguments after the first. The target is
    the function, or the method's name."""

    def __init__(
        self,
        target: Callable[..., Any] | str,
        args: Sequence[Argument],
        kwargs: Mapping[str, Argument],
    ) -> None:
        super().__init__()
        self.target = target
        self.args = tuple(args)
        self.kwargs = dict(kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.target, str):
            return getattr(x, self.target)(*self.args, **self.kwargs)
        return self.target(x, *self.args, **self.kwargs)

    def extra_repr(self) -> str:
        return self.target if isinstance(self.target, str) else self.target.__name__


class MemoryLayout(nn.Module):
    """Converts a 4-D tensor to a memory format; leaves other tensors unchanged."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.memory_format = memory_format

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous(memory_format=self.memory_format) if x.ndim == 4 else x
