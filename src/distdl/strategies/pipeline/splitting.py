"""A module is cut: each rank keeps its blocks, the others leave their shape."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from distdl.models.blocks import NamedBlock
from distdl.util.errors import UserError

# What a module must have to be split; see docs/strategies/pipeline.md.
CONTRACT = ("pipeline_blocks", "pipeline_inputs", "pipeline_loss")


@dataclass(frozen=True)
class Block:
    """What is never cut: one block with parameters, and those without that follow it.

    A stage so begins with parameters. An in-place ReLU as its first step would write into what was
    received, which autograd forbids.

    Args:
        name: Of its first module that has one; names the block for the user.
        parts: Modules, applied in order, and their names in the LightningModule.
    """

    name: str
    parts: tuple[NamedBlock, ...]

    @property
    def modules(self) -> list[nn.Module]:
        return [module for _, module in self.parts]

    @property
    def size(self) -> int:
        """Parameters, counted."""
        return sum(p.numel() for m in self.modules for p in m.parameters())

    def on_meta(self) -> nn.Sequential:
        """Its shapes, without memory, in evaluation mode."""
        return nn.Sequential(*(_on_meta(module) for module in self.modules)).eval()


def _on_meta(module: nn.Module) -> nn.Module:
    # One tensor at a time: the module must not be in memory twice.
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(module, memo)


def blocks_in(module: nn.Module) -> list[Block]:
    """The blocks of a module that follows the contract.

    Raises:
        UserError: It does not, a parameter is in no block or in two, or nothing can be cut.
    """
    missing = [f"no {name}()" for name in CONTRACT if not hasattr(module, name)]
    if missing:
        what = f"{type(module).__name__} cannot be split into stages: it has {', '.join(missing)}"
        remedy = "docs/strategies/pipeline.md says what they return; or strategy=ddp"
        raise UserError.at("strategy", what, remedy)
    blocks: list[list[NamedBlock]] = [[]]
    for name, part in module.pipeline_blocks():  # type: ignore[operator]
        has_parameters = next(part.parameters(), None) is not None
        if has_parameters and any(next(p.parameters(), None) is not None for _, p in blocks[-1]):
            blocks.append([])
        blocks[-1].append((name, part))
    titled = [Block(_title(parts, i), tuple(parts)) for i, parts in enumerate(blocks)]
    _check_parameters(module, titled)
    return titled


def _title(parts: Sequence[NamedBlock], number: int) -> str:
    named = [name for name, part in parts if name and next(part.parameters(), None) is not None]
    return named[0] if named else f"block {number}"


def _check_parameters(module: nn.Module, blocks: Sequence[Block]) -> None:
    owners: dict[int, int] = {}
    modules = dict(module.named_modules(remove_duplicate=False))
    for number, block in enumerate(blocks):
        for name, part in block.parts:
            # None, or not what the module has under that name: it could not be put away.
            if name is None and next(part.parameters(), None) is not None:
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
    return UserError.at("strategy", what, "strategy=ddp")


class Elsewhere(nn.Module):
    """Stands where a block was that another stage has, so that the names of the others stay.

    A full state dict still loads: what belongs to this block is passed over.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # In a tuple it is no submodule: neither its parameters nor its names are the module's.
        self.shadow = (_on_meta(block),)

    def forward(self, *_: Any) -> Any:
        raise RuntimeError(
            "this block is on another stage of the pipeline: call the LightningModule itself, in "
            "its steps, on all ranks"
        )

    def _load_from_state_dict(self, *_: Any) -> None:
        pass


def split(module: nn.Module, blocks: Sequence[Block], kept: Collection[int]) -> None:
    """Replaces by `Elsewhere` the blocks whose number is not among `kept`."""
    for number, block in enumerate(blocks):
        for name, part in block.parts:
            if name is not None and number not in kept:
                _replace(module, name, Elsewhere(part))


@contextmanager
def complete(module: nn.Module) -> Iterator[None]:
    """For a moment the module is complete: blocks of other stages are there, on `meta`.

    So names, their order and the groups of an optimizer come out as they do in one process.
    """
    absent = {n: m for n, m in module.named_modules() if isinstance(m, Elsewhere)}
    for name, standing in absent.items():
        _replace(module, name, standing.shadow[0])
    try:
        yield
    finally:
        for name, standing in absent.items():
            _replace(module, name, standing)


def _replace(module: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, new)


def is_split(module: LightningModule) -> bool:
    return any(isinstance(m, Elsewhere) for m in module.modules())
