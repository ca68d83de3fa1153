"""Freezes parts of a network: their weights, and the statistics of their batch norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from distdl.models.parts import chosen, inside
from distdl.optim.parameter_groups import plain_name
from distdl.util.errors import UserError

KEY = "model.freeze"


@dataclass(frozen=True)
class Frozen:
    """What is frozen, by names in the network.

    Args:
        weights: Of parameters.
        norms: Of batch norms that stay in evaluation mode, so that their statistics do not move.
    """

    weights: frozenset[str] = frozenset()
    norms: frozenset[str] = frozenset()

    def keep_statistics(self, network: nn.Module) -> None:
        """Puts the norms into evaluation mode: after each `train()`."""
        for name, module in network.named_modules() if self.norms else ():
            if plain_name(name) in self.norms:
                module.eval()

    def thaw(self, network: nn.Module) -> None:
        """Makes all of it trainable, and lets the norms follow the network's mode."""
        for name, parameter in network.named_parameters():
            if plain_name(name) in self.weights:
                parameter.requires_grad_(True)
        for name, module in network.named_modules():
            if plain_name(name) in self.norms:
                module.train(network.training)


def freeze(network: nn.Module, patterns: Sequence[str], heads: Sequence[str] = ()) -> Frozen:
    """Freezes the modules and parameters that patterns name (`parts.chosen`), in place.

    Dropout in frozen parts stays as it is. timm's `freeze` is not used: it replaces batch norms by
    layers with other names in a checkpoint.

    Args:
        heads: What "backbone" leaves out.

    Raises:
        UserError: A pattern names nothing, or nothing is left to train.
    """
    names = chosen(network, patterns, heads, KEY)
    weights = [(n, p) for n, p in network.named_parameters() if inside(n, names)]
    for _, parameter in weights:
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError.at(
            KEY,
            what=f"nothing is left to train in {type(network).__name__}",
            remedy="leave the head out: model.freeze=[backbone]",
            code="conflict",
        )
    norms = [
        name
        for name, module in network.named_modules()
        if isinstance(module, _NormBase)
        and (inside(name, names) or _all_frozen([*module.parameters(recurse=False)]))
    ]
    frozen = Frozen(frozenset(name for name, _ in weights), frozenset(norms))
    frozen.keep_statistics(network)
    return frozen


def _all_frozen(parameters: Sequence[nn.Parameter]) -> bool:
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
