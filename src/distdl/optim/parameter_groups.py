"""Which parameters an optimizer gets, in which groups: decayed or not, and with which rate."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from distdl.optim.learning_rates import LAYER, LayerRate

# What activation checkpointing and torch.compile add to the names of modules.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
# Optimizers for matrices, with another one for all else, which a group chooses by this key.
WITH_FALLBACK = ("timm.optim.Muon", "timm.optim.muon.Muon")
FALLBACK = "use_fallback"
# Key of a parameter group: its rate, as a factor of the optimizer's.
FACTOR = "lr_factor"

# _NormBase: batch norm in all its kinds (synchronised, lazy) and instance norm.
_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)
# timm's norm layers that are not subclasses of torch's.
_TIMM_NORMS = (
    "RmsNorm",
    "RmsNorm2d",
    "SimpleNorm",
    "SimpleNorm2d",
    "FrozenBatchNormAct2d",
    "FilterResponseNormTlu2d",
    "FilterResponseNormAct2d",
    "GlobalResponseNorm",
    "EvoNorm2dB0",
    "EvoNorm2dB1",
    "EvoNorm2dB2",
    "EvoNorm2dS0",
    "EvoNorm2dS1",
    "EvoNorm2dS2",
)


def parameter_groups(
    module: nn.Module,
    weight_decay: float | None,
    decay_norm_and_bias: bool = False,
    rates: Sequence[LayerRate] = (),
    later: Collection[str] = (),
    heads: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """The parameters that are trained, each once: at most two groups for an optimizer, or for each
    of `rates`; decayed ones first. With `heads`, the decayed ones are two groups. Those that are
    trained later have such groups of their own, which come last: ZeRO keeps one number of steps for
    all parameters of a group, and sets groups aside that are not trained yet.

    Parameters of normalisation layers and biases are not decayed (Goyal et al. 2017, section 5.3;
    He et al. 2019, "Bag of Tricks"), unless `decay_norm_and_bias`. Normalisation layers are found
    by their type, not their name. A `weight_decay` of None is the optimizer's default.

    Args:
        later: Names of frozen parameters that will be trained.
        heads: For an optimizer of matrices (`WITH_FALLBACK`): the names of the head's parameters.
            It gets the weights of all other linear layers and convolutions; the head, embeddings,
            norms, biases and parameters of other layers get its fallback (Jordan et al. 2024).
    """
    rate_of_name = {name: rate for rate in rates for name in rate.parameters}
    full = LayerRate("others", 1.0, frozenset())
    members_of = {(after, rate): Members() for after in (False, True) for rate in (*rates, full)}
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            whole = plain_name(f"{path}.{name}" if path else name)
            if id(parameter) in seen or not (parameter.requires_grad or whole in later):
                continue
            seen.add(id(parameter))
            spare = is_norm(owner) or _is_bias(owner, name)
            members = members_of[whole in later, rate_of_name.get(whole, full)]
            if spare and not decay_norm_and_bias:
                members.spared.append(parameter)
            elif heads is None or (_is_matrix(owner, name) and whole not in heads):
                members.decayed.append(parameter)
            else:
                members.others.append(parameter)
    first = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups: list[dict[str, Any]] = []
    fallback = {} if heads is None else {FALLBACK: True}
    for (_, rate), members in members_of.items():
        layer = {LAYER: rate.name, FACTOR: rate.factor} if rates else {}
        groups.append({"params": members.decayed, **first, **layer})
        groups.append({"params": members.others, **first, **layer, **fallback})
        groups.append({"params": members.spared, "weight_decay": 0.0, **layer, **fallback})
    return [group for group in groups if group["params"]]


@dataclass(frozen=True)
class Members:
    """Parameters of one rate: decayed ones, decayed ones of the fallback, and spared ones."""

    decayed: list[nn.Parameter] = field(default_factory=list)
    others: list[nn.Parameter] = field(default_factory=list)
    spared: list[nn.Parameter] = field(default_factory=list)


def plain_name(name: str) -> str:
    """The name of a module or parameter as it is where nothing wraps modules."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_norm(module: nn.Module) -> bool:
    """Whether it is a normalisation layer, by its type."""
    # Models with timm's layers have imported them already; other models need not wait for that.
    timm = sys.modules.get("timm.layers")
    norms = (*_NORMS, *(getattr(timm, name) for name in _TIMM_NORMS if hasattr(timm, name)))
    return isinstance(module, norms)


def _is_bias(owner: nn.Module, name: str) -> bool:
    # torch's attention and recurrent layers have several biases: in_proj_bias, bias_ih_l0.
    several = isinstance(owner, nn.MultiheadAttention | nn.RNNBase)
    return name == "bias" or (several and "bias" in name)


def _is_matrix(owner: nn.Module, name: str) -> bool:
    """Whether a parameter is multiplied with features: the weight of a linear layer or of a
    convolution, or those of torch's attention."""
    if isinstance(owner, nn.MultiheadAttention):
        return name.endswith("_proj_weight")
    return name == "weight" and isinstance(owner, nn.Linear | _ConvNd)
