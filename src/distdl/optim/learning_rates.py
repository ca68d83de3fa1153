"""The learning rates that an optimizer's node asks for: by the global batch, and by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distdl.util.errors import UserError

# Keys of an optimizer's node that give layers a rate of their own.
OF_LAYERS = ("layer_decay", "backbone_lr")
# Key of a parameter group: the layer whose rate it has.
LAYER = "layer"


def scale_lr(lr: float, global_batch: int, rule: str, reference: int = 256) -> float:
    """Scales a learning rate from a global batch of `reference` images to `global_batch`.

    Args:
        rule: "linear" (Goyal et al. 2017), "sqrt" (Krizhevsky 2014, "One weird trick") or "none".

    Raises:
        UserError: For another rule.
    """
    if rule == "linear":
        return lr * global_batch / reference
    if rule == "sqrt":
        return lr * math.sqrt(global_batch / reference)
    if rule == "none":
        return lr
    raise UserError.at(
        "optimizer.lr_scaling",
        what=f"no rule {rule!r}",
        remedy="one of linear, sqrt, none",
        code="wrong-choice",
    )


@dataclass(frozen=True)
class RateScaling:
    """How the rate of an optimizer node follows the global batch: see `scale_lr`."""

    rule: str = "none"
    reference: int = 256

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RateScaling:
        rule = config.get("lr_scaling", cls.rule)
        reference = config.get("lr_reference_batch", cls.reference)
        return cls(str(rule), int(reference))

    def rate(self, lr: float, global_batch: int) -> float:
        return scale_lr(lr, global_batch, self.rule, self.reference)


def rate_of(config: Mapping[str, Any], global_batch: int) -> float:
    """The scaled learning rate of an optimizer node, which must have an `lr`."""
    return RateScaling.of(config).rate(float(config["lr"]), global_batch)


def describe_lr(config: Mapping[str, Any], global_batch: int) -> str:
    """One line that explains the learning rate of an optimizer node."""
    if "lr" not in config:
        return "lr is the optimizer's default"
    lr = float(config["lr"])
    scaling = RateScaling.of(config)
    if scaling.rule == "none":
        return f"lr {lr:g} (not scaled by the global batch of {global_batch})"
    ratio = f"{global_batch}/{scaling.reference}"
    factor = f"sqrt({ratio})" if scaling.rule == "sqrt" else ratio
    rate = scaling.rate(lr, global_batch)
    return f"lr {lr:g} per {scaling.reference} images x {factor} ({scaling.rule}) = {rate:g}"


@dataclass(frozen=True)
class LayerRate:
    """Parameters with a rate of their own.

    Args:
        name: Of the layer, for messages and metrics.
        factor: Of the optimizer's rate.
        parameters: Their names in the module.
    """

    name: str
    factor: float
    parameters: frozenset[str]


def layer_rates(
    layers: Mapping[str, Sequence[str]], heads: Sequence[str], config: Mapping[str, Any]
) -> list[LayerRate]:
    """The rates that `layer_decay` or `backbone_lr` of an optimizer node gives, the highest first;
    empty without either.

    The last layer has the full rate, and each one before it `layer_decay` times that of the next
    (Howard and Ruder 2018; Clark et al. 2020, "ELECTRA"; Bao et al. 2022, "BEiT"). With
    `backbone_lr` all but the head has that rate.

    Args:
        layers: The names of parameters by layer, in the order of forward.
        heads: The layers that are the head, of those.

    Raises:
        UserError: There is one layer alone, or no known head.
    """
    decay = config.get("layer_decay")
    backbone = config.get("backbone_lr")
    if decay is not None and len(layers) < 2:
        raise UserError.at(
            "optimizer.layer_decay",
            what="the layers of the model and their order are not known",
            remedy="optimizer.layer_decay=null, or a method pipeline_blocks() of the module",
            code="unsupported",
        )
    if decay is not None:
        order = [(name, frozenset(layers[name])) for name in reversed([*layers])]
        return [LayerRate(name, decay**i, names) for i, (name, names) in enumerate(order)]
    if backbone is None:
        return []
    first = frozenset(name for layer in heads for name in layers.get(layer, ()))
    rest = frozenset(name for names in layers.values() for name in names) - first
    if not first or not rest:
        raise UserError.at(
            "optimizer.backbone_lr",
            what="it is not known which part of the model is the head",
            remedy="optimizer.layer_decay, which needs no head, or a module with a part `backbone`",
            code="unsupported",
        )
    factor = float(backbone) / float(config["lr"])
    return [LayerRate("head", 1.0, first), LayerRate("backbone", factor, rest)]


def describe_groups(groups: Sequence[Mapping[str, Any]]) -> str:
    """The rates of layers, as they are before the schedule; "" if all groups have the same."""
    rates: dict[str, float] = {}
    for group in groups:
        if LAYER in group:
            rates[group[LAYER]] = float(group.get("initial_lr", group["lr"]))
    return ", ".join(f"{layer} {rate:.3g}" for layer, rate in rates.items())
