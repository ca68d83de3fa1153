"""Cuts a module: a rank keeps its own blocks, and of the other blocks only the shapes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import nn

from distdl.models.blocks import NamedBlock
from distdl.util.errors import UserError

# The methods that a module needs to be split; see docs/strategies/pipeline.md.
CONTRACT = ("pipeline_blocks", "pipeline_inputs", "pipeline_loss")


@dataclass(frozen=True)
class Block:
    """A unit that is never cut: a module with parameters, and the following modules without any.

    So no stage begins with an in-place ReLU, which would write into the received tensor. Autograd
    forbids this.
    """

    name: str  # shown to users: that of the first module with a name and parameters
    parts: tuple[NamedBlock, ...]  # applied in order, with their names in the LightningModule

    @property
    def modules(self) -> list[nn.Module]:
        return [module for _, module in self.parts]

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for m in self.modules for p in m.parameters())

    def on_meta(self) -> nn.Sequential:
        """A copy on `meta` (shapes without memory), in evaluation mode."""
        return nn.Sequential(*(_on_meta(module) for module in self.modules)).eval()


def _on_meta(module: nn.Module) -> nn.Module:
    # `memo` keeps deepcopy from copying the tensors: the module must not be in memory twice.
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(module, memo)


def blocks_in(module: nn.Module) -> list[Block]:
    """The blocks of a module with the methods of CONTRACT.

    Raises:
        UserError: A method is missing, or a parameter is in no block or in two.
    """
    missing = [f"no {name}()" for name in CONTRACT if not hasattr(module, name)]
    if missing:
        raise UserError.at(
            "strategy",
            what=(
                f"{type(module).__name__} cannot be split into stages: it has {', '.join(missing)}"
            ),
            remedy="add them (docs/strategies/pipeline.md), or write strategy=ddp",
            code="unsupported",
        )
    blocks: list[list[NamedBlock]] = [[]]
    for name, part in module.pipeline_blocks():  # type: ignore[operator]
        if _has_weights(part) and any(_has_weights(p) for _, p in blocks[-1]):
            blocks.append([])
        blocks[-1].append((name, part))
    named = [
        Block(next((n for n, p in parts if n and _has_weights(p)), f"block {i}"), tuple(parts))
        for i, parts in enumerate(blocks)
    ]
    _check_parameters(module, named)
    return named


def _has_weights(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def _check_parameters(module: nn.Module, blocks: Sequence[Block]) -> None:
    owners: dict[int, int] = {}
    modules = dict(module.named_modules(remove_duplicate=False))
    for number, block in enumerate(blocks):
        for name, part in block.parts:
            # `split` could not replace a block without its name in the module.
            if name is None and _has_weights(part):
                raise _refused(f"the block {type(part).__name__} has parameters and no name")
            if name is not None and modules.get(name) is not part:
                raise _refused(f"the block {name!r} is not the module of that name")
            for parameter in part.parameters():
                if owners.setdefault(id(parameter), number) != number:
                    raise _refused(f"two blocks share a parameter, one of them is {block.name}")
    for name, parameter in module.named_parameters():
        if id(parameter) not in owners:
            raise _refused(f"the parameter {name} is in none of the blocks")


def _refused(what: str) -> UserError:
    what = f"the model cannot be split into stages: {what}"
    return UserError.at("strategy", what=what, remedy="strategy=ddp", code="unsupported")


class Elsewhere(nn.Module):
    """Stands in for a block of another stage, so that the names of this stage's blocks stay.

    A full state dict still loads: the entries of this block are ignored.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that it is not registered as a submodule.
        self.shadow = (_on_meta(block),)

    def forward(self, *_: object) -> NoReturn:
        raise RuntimeError(
            "this block is on another stage of the pipeline: call the LightningModule itself, in "
            "its steps, on all ranks"
        )

    def _load_from_state_dict(self, *_: object) -> None:
        pass


def split(module: nn.Module, blocks: Sequence[Block], kept: Collection[int]) -> None:
    """Replaces all blocks except those numbered in `kept` by `Elsewhere`."""
    for number, block in enumerate(blocks):
        for name, part in block.parts:
            if name is not None and number not in kept:
                module.set_submodule(name, Elsewhere(part))


@contextmanager
def complete(module: nn.Module) -> Iterator[None]:
    """Temporarily completes the module with the other stages' blocks, on `meta`.

    Names, their order and the groups of an optimizer are then the same as in one process.
    """
    absent = {n: m for n, m in module.named_modules() if isinstance(m, Elsewhere)}
    for name, stand_in in absent.items():
        module.set_submodule(name, stand_in.shadow[0])
    try:
        yield
    finally:
        for name, stand_in in absent.items():
            module.set_submodule(name, stand_in)


def is_split(module: LightningModule) -> bool:
    return any(isinstance(m, Elsewhere) for m in module.modules())
