"""`model.lora`: low-rank adapters beside frozen weights (Hu et al. 2021, "LoRA",
https://arxiv.org/abs/2106.09685), by peft.

A layer with weights W then computes W x + (alpha / rank) B A x, of which A and B alone are trained.
So is the head. A checkpoint has what is trained and the buffers; the frozen weights come from where
the config has them (`model.weights`), and must have the same bits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

from distdl.checkpoint.adapters import KEY as SAVED
from distdl.checkpoint.convert import raw
from distdl.models.evaluated import Evaluated
from distdl.models.freezing import Frozen
from distdl.models.parts import chosen, heads_of_module, inside
from distdl.optim.averages import norms_of
from distdl.util import typed
from distdl.util.errors import Problem, UserError
from distdl.util.extras import install
from distdl.util.wording import first_few
from distdl.validation.meta import build_on_meta, targets_own

KEY = "lora"
PATH = f"model.{KEY}"
# Each rank has all of a weight, or an even slice of it. The others lay out flat parts or stages.
CARRY = ("", "auto", "single", "SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy")


class LoraSettings(BaseModel, extra="forbid", strict=True, frozen=True):
    """The node `model.lora`.

    Args:
        rank: Of each adapter.
        alpha: The adapters' outputs are multiplied by alpha / rank; None: by 1.
        dropout: Of what the adapters get.
        targets: Layers with adapters: names in the network, and patterns of `fnmatch`; None: all
            linear layers and convolutions but the head.
    """

    rank: int = Field(8, ge=1)
    alpha: float | None = Field(None, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: list[str] | None = None

    @classmethod
    def of(cls, node: object) -> LoraSettings:
        """The settings of a node.

        Raises:
            UserError: It does not fit.
        """
        if not isinstance(node, Mapping):
            raise UserError.at(
                PATH,
                what=f"{node!r} is no mapping of {', '.join(cls.model_fields)}",
                remedy=f"{PATH}.rank=8",
                code="wrong-type",
            )
        values = {str(key): value for key, value in node.items()}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            found = typed.problems(error, values, cls.model_fields, f"{PATH}.")
            raise UserError(*(replace(p, path=f"{PATH}.{p.path}") for p in found)) from None


def network_of(module: nn.Module) -> nn.Module:
    """What names are relative to: the module's `network`, if it has one."""
    network = getattr(module, "network", None)
    return network if isinstance(network, nn.Module) else module


def layers_with(module: nn.Module, settings: LoraSettings) -> tuple[list[str], tuple[str, ...]]:
    """The layers that get adapters, and those of the head, by their names in the network.

    Raises:
        UserError: A name fits nothing, or a layer that can have no adapter.
    """
    network = network_of(module)
    heads = heads_of_module(module, network)
    fitting = [name for name, layer in network.named_modules() if _fits(layer, settings.rank)]
    if settings.targets is None:
        found = [name for name in fitting if not inside(name, heads)]
    else:
        parts = chosen(network, settings.targets, heads, f"{PATH}.targets")
        found = [name for name in fitting if inside(name, parts)]
        for part in sorted(parts):
            if not any(inside(name, [part]) for name in found):
                raise UserError.at(
                    f"{PATH}.targets",
                    what=(
                        f"{part} is or has no linear layer or convolution for rank {settings.rank}"
                    ),
                    remedy=f"some of {', '.join(fitting[:3])}, ..., or null for all but the head",
                    code="wrong-choice",
                )
    if not found:
        raise UserError.at(
            PATH,
            what=f"{type(network).__name__} has no linear layer or convolution but its head",
            remedy="model.lora=null",
            code="unsupported",
        )
    return found, tuple(head for head in heads if head not in found)


def _fits(layer: nn.Module, rank: int) -> bool:
    """Whether a layer can have an adapter of this rank: each group of a convolution has a part."""
    if isinstance(layer, nn.Linear):
        return type(layer) is nn.Linear  # not the inner layer of torch's attention
    return isinstance(layer, _ConvNd) and not layer.transposed and rank % layer.groups == 0


def apply(module: nn.Module, node: object) -> None:
    """Adds adapters to a module, in place, and freezes its other weights but the head.

    Batch norms of a network in distdl's modules stay in evaluation mode.

    Args:
        node: `model.lora`; None: nothing is done.

    Raises:
        UserError: The node does not fit the module, or peft is not installed.
    """
    if node is None:
        return
    settings = LoraSettings.of(node)
    names, heads = layers_with(module, settings)
    network = network_of(module)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise UserError.at(
            PATH,
            what=f"needs {error.name}, which is not installed",
            remedy=install("peft"),
            code="not-installed",
        ) from None
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.rank if settings.alpha is None else settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules="|".join(map(re.escape, names)),
    )
    inject_adapter_in_model(config, network)
    for name, parameter in network.named_parameters():
        if inside(name, heads):
            parameter.requires_grad_(True)
    if isinstance(module, Evaluated):
        module.frozen = Frozen(norms=frozenset(norms_of(network)))
        module.frozen.keep_statistics(network)


def trained_names(module: nn.Module) -> frozenset[str]:
    """The names in a state of what a checkpoint has: trained parameters, and buffers."""
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return frozenset(name for name in module.state_dict() if name not in frozen)


def digest_of(module: nn.Module, trained: Collection[str]) -> str:
    """SHA-256 of the names and bits of all that is not trained."""
    total = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if name not in trained:
            total.update(f"{name} {value.dtype} {[*value.shape]}\n".encode())
            total.update(raw(value).cpu().numpy().data)
    return total.hexdigest()


def refuse_others(checkpoint: Mapping[str, Any], file: str, digest: str) -> None:
    """For adapters that are to be loaded.

    Args:
        digest: Of the weights beside them (`digest_of`); "": the model has no adapters.

    Raises:
        UserError: They were trained beside other weights, or the one has adapters, the other not.
    """
    saved = (checkpoint.get(SAVED) or {}).get("beside")
    if saved is None and not digest:
        return
    if not digest:
        raise UserError.at(
            file,
            what="it holds what model.lora trains, and the model has no model.lora",
            remedy="model.lora as the run has it",
            code="mismatch",
        )
    if saved is None:
        raise UserError.at(
            file,
            what="it holds no adapters, and the model has model.lora",
            remedy="start from its weights: model.weights=FILE; or model.lora=null",
            code="mismatch",
        )
    if saved != digest:
        raise UserError.at(
            file,
            what="its adapters were trained beside other weights than the model has now",
            remedy="model.weights as it was then",
            code="mismatch",
        )


def refuse_missing(trained: Collection[str], weights: Collection[str], file: str) -> None:
    """Raises a UserError if a checkpoint lacks something of what is trained."""
    if missing := sorted({*trained} - {*weights}):
        raise UserError.at(
            file,
            what=f"its adapters are not those of {PATH} now: it lacks {first_few(missing)}",
            remedy=f"{PATH} as it was then",
            code="mismatch",
        )


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Adds each adapter to the weights beside it, which then answer alone. Of weights in slices
    (FSDP) nothing is merged: the adapters answer beside them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return
    for layer in module.modules():
        if isinstance(layer, BaseTunerLayer) and not layer.merged:
            layer.merge(safe_merge=True)


def without_adapters(module: nn.Module) -> None:
    """Merges, and puts the layers back that had adapters, with their own names."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    merge(module)
    adapted = [n for n, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)]
    for name in adapted:
        parent, _, attribute = name.rpartition(".")
        layer: Any = module.get_submodule(name)
        setattr(module.get_submodule(parent), attribute, layer.get_base_layer())


class LoraCheck:
    """What the validation asks of `model.lora`, whatever the model is."""

    @staticmethod
    def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem | str]:
        """Builds the model without memory, since only its layers show what names fit.

        Yields:
            Problems, with paths relative to the model's node; a text, if it cannot be built so.
        """
        if node.get(KEY) is None:
            return
        config = context.get("config") or {}
        yield from _refused(node, config)
        if context["local"] and importlib.util.find_spec("peft") is None:
            yield Problem(
                KEY,
                what="needs the package peft, which is not installed",
                remedy=install("peft"),
                code="not-installed",
            )
        try:
            settings = LoraSettings.of(node[KEY])
            layers_with(build_on_meta(targets_own(node)), settings)
        except UserError as error:
            found = error.problems
            yield from (replace(p, path=p.path.removeprefix("model.")) for p in found)
        except Exception as error:  # any class's __init__ runs; its problems are told elsewhere
            yield f"{KEY}: {type(error).__name__} where the model is built without memory"


def _refused(node: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Problem]:
    for key in ("freeze", "unfreeze_at"):
        if node.get(key):
            yield Problem(
                key,
                what=f"has no effect beside {PATH}, which trains adapters and the head alone",
                remedy=f"leave it out, or {PATH}=null",
                code="conflict",
            )
    kind = str((config.get("strategy") or {}).get("_target_", "")).rpartition(".")[2]
    if kind not in CARRY:
        yield Problem(
            KEY,
            what=(
                f"{kind} lays out all weights at the start, and a checkpoint has the adapters alone"
            ),
            remedy="strategy=ddp, fsdp or single",
            code="unsupported",
        )
    for name, callback in (config.get("callbacks") or {}).items():
        if str((callback or {}).get("_target_", "")).endswith("WeightAveraging"):
            yield Problem(
                KEY,
                what=f"callbacks.{name} averages and saves all weights, and not the adapters alone",
                remedy=f"leave it out: ~callbacks.{name}",
                code="conflict",
            )
