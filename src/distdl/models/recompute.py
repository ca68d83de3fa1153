"""`model.recompute`: blocks that keep their input alone and compute the rest again in the backward
(activation checkpointing, Chen et al. 2016, https://arxiv.org/abs/1604.06174).

It costs one more forward of these blocks for each step. Gradients, buffers and losses stay equal
bit by bit, dropout included. torch.utils.checkpoint does the work; what it leaves to its users is
here: a second forward would count every batch twice in the statistics of batch norm
(pytorch#96136), and torch's wrapper would change the names of parameters, under which checkpoints
know them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from distdl.models.blocks import blocks_of
from distdl.util.errors import Problem, UserError
from distdl.util.suggest import closest_pattern, did_you_mean_word
from distdl.validation.meta import build_on_meta, targets_own

KEY = "recompute"
PATH = f"model.{KEY}"
AUTO = "auto"  # none or blocks, which a training chooses before it builds the module

Choice = str | Sequence[str] | None


class Recomputed:
    """The forward of a block, which in training keeps the block's arguments alone."""

    def __init__(self, name: str, block: nn.Module) -> None:
        self.name = name
        self.block = block
        self.once = block.forward

    def __call__(self, *arguments: object, **named: object) -> object:
        # Without a backward nothing is kept in any case.
        if not torch.is_grad_enabled():
            return self.once(*arguments, **named)
        # A keyword of the block may have the name of one of torch's.
        once = partial(self.once, **named)
        if torch.compiler.is_compiling():
            # torch.compile refuses `context_fn`, and does not repeat what a norm counts.
            return checkpoint(once, *arguments, use_reentrant=False)
        contexts = partial(_contexts, self)
        return checkpoint(once, *arguments, use_reentrant=False, context_fn=contexts)


def _contexts(
    recomputed: Recomputed,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return _refusing_other_state(recomputed), _keeping_statistics(recomputed.block)


@contextlib.contextmanager
def _refusing_other_state(recomputed: Recomputed) -> Iterator[None]:
    """For the first forward. A layer other than batch norm that changes a buffer there would
    compute something else the second time."""
    others = [part for part in recomputed.block.modules() if not isinstance(part, _BatchNorm)]
    buffers = [(part, buffer) for part in others for buffer in part.buffers(recurse=False)]
    before = [_version(buffer) for _, buffer in buffers]
    yield
    for (part, buffer), version in zip(buffers, before, strict=True):
        if _version(buffer) != version:
            raise UserError.at(
                PATH,
                what=f"{recomputed.name}: {type(part).__name__} changes a buffer in its forward",
                remedy=f"name other blocks, without this one: '{PATH}=[...]'",
                code="unsupported",
            )


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


@contextlib.contextmanager
def _keeping_statistics(block: nn.Module) -> Iterator[None]:
    """For the second forward, in which batch norms count into copies."""
    norms = [
        part
        for part in block.modules()
        if isinstance(part, _BatchNorm) and part.training and part.track_running_stats
    ]
    kept = [dict(norm._buffers) for norm in norms]
    try:
        for norm in norms:
            norm._buffers.update(
                {k: None if v is None else v.clone() for k, v in norm._buffers.items()}
            )
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)


def apply(module: nn.Module, choice: Choice) -> list[str]:
    """Lets blocks of a module recompute, in place.

    Args:
        choice: "none", or "auto" where nothing is trained; "blocks": the blocks at which a pipeline
            would divide the module, else the items of its lists of layers; or names of submodules,
            and patterns such as `network.layer[34].*`.

    Returns:
        The names of the blocks. One that lies inside another is left out.

    Raises:
        UserError: The module has no blocks, or nothing has such a name.
    """
    if choice in (None, "none", AUTO):
        return []
    if choice == "blocks":
        names = _own_blocks(module)
    elif isinstance(choice, str):
        near = did_you_mean_word(choice, ("none", "blocks", AUTO))
        raise UserError.at(
            PATH,
            what=f"is {choice!r}",
            remedy=near or "none, blocks, auto, or a list of names",
            code="wrong-choice",
        )
    else:
        names = _named(module, choice)
    outermost = [name for name in names if not any(name.startswith(f"{n}.") for n in names)]
    for name in outermost:
        block = module.get_submodule(name)
        block.forward = Recomputed(name, block)
    return outermost


def blocks_in(module: nn.Module) -> list[str]:
    """The names of the blocks of a module that recompute."""
    return [name for name, part in module.named_modules() if isinstance(part.forward, Recomputed)]


class Check:
    """What the validation asks of `model.recompute`, whatever the model is."""

    @staticmethod
    def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem | str]:
        """Builds the model without memory, since only its layers show whether it has such blocks.

        Yields:
            Problems, with paths relative to the model's node; a text, if it cannot be built so.
        """
        choice = node.get(KEY)
        if choice in (None, "none", AUTO):
            return
        try:
            module = build_on_meta(targets_own(node))
        except Exception as error:  # any class's __init__ runs; its own problems are told elsewhere
            yield f"{KEY}: {type(error).__name__} where the model is built without memory"
            return
        try:
            names = apply(module, choice)
        except UserError as error:
            yield from (replace(problem, path=KEY) for problem in error.problems)
            return
        strategy = str(((context.get("config") or {}).get("strategy") or {}).get("_target_"))
        if strategy.endswith(".PipelineStrategy"):
            opened = [n for n in names if type(module.get_submodule(n)) is nn.Sequential]
            if opened:
                yield Problem(
                    KEY,
                    what=f"a pipeline divides {opened[0]}, which would recompute nothing",
                    remedy=f"'{PATH}=[{opened[0]}.*]'",
                    code="conflict",
                )


def _named(module: nn.Module, patterns: Iterable[str]) -> list[str]:
    known = [name for name, _ in module.named_modules() if name]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matching = [name for name in known if fnmatchcase(name, pattern)]
        if not matching:
            near = closest_pattern(pattern, known)
            raise UserError.at(
                PATH,
                what=f"no layer of {type(module).__name__} has the name {pattern!r}",
                remedy=f"did you mean '{PATH}=[{near}]'?" if near else f"{PATH}=blocks",
                code="wrong-choice",
            )
        chosen.update(dict.fromkeys(matching))
    return list(chosen)


def _own_blocks(module: nn.Module) -> list[str]:
    found = [name for name in _chain_of(module) if _has_layers(module.get_submodule(name))]
    found = found or _items(module)
    if not found:
        raise UserError.at(
            PATH,
            what=f"{type(module).__name__} has no blocks: no list of layers that have layers",
            remedy=f"name some: '{PATH}=[...]'",
            code="indivisible",
        )
    return found


def _chain_of(module: nn.Module) -> list[str]:
    """The names of a pipeline's blocks; none for a module that cannot be divided."""
    stated: Callable[[], Sequence[tuple[str | None, nn.Module]]] | None
    stated = getattr(module, "pipeline_blocks", None)
    try:
        blocks = stated() if stated is not None else blocks_of(module)
    except UserError:
        return []
    return [name for name, _ in blocks if name]


def _items(module: nn.Module) -> list[str]:
    """The items of lists of layers that have layers themselves."""
    return [
        f"{name}.{item}" if name else item
        for name, part in module.named_modules()
        if isinstance(part, nn.Sequential | nn.ModuleList)
        for item, layer in part.named_children()
        if _has_layers(layer)
    ]


def _has_layers(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
