"""The parts of a network: its head, the parts that patterns name, and its layers in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from distdl.domains.detection.network_parts import part_of
from distdl.models.blocks import blocks_of
from distdl.optim.parameter_groups import is_norm
from distdl.util.errors import UserError
from distdl.util.suggest import closest_pattern

BACKBONE = "backbone"  # all but the head, in a network without a module of this name
LISTS = (nn.Sequential, nn.ModuleList)


def heads_of(network: nn.Module, classes: int | None) -> tuple[str, ...]:
    """The names of the layers that give a classifier's logits; empty if none is known.

    timm's networks name them (`pretrained_cfg`). In any other network it is the last layer with
    `classes` outputs, or the last layer of all if `classes` is None.
    """
    stated = (getattr(network, "pretrained_cfg", None) or {}).get("classifier")
    layers = dict(network.named_modules())
    if stated:
        names = (stated,) if isinstance(stated, str) else tuple(stated)
        if all(name in layers for name in names):
            return names
    outputs = {name: _outputs(layer) for name, layer in layers.items()}
    with_outputs = [name for name, count in outputs.items() if count]
    if classes is not None:
        with_outputs = [name for name in with_outputs if outputs[name] == classes]
    return tuple(with_outputs[-1:])


def _outputs(layer: nn.Module) -> int | None:
    """How many features or channels a layer gives; None: it is neither linear nor a convolution."""
    for name in ("out_features", "out_channels"):
        if isinstance(count := getattr(layer, name, None), int):
            return count
    return None


def inside(name: str, parts: Iterable[str]) -> bool:
    """Whether a name is one of `parts`, or is below one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def chosen(network: nn.Module, patterns: Sequence[str], heads: Sequence[str], key: str) -> set[str]:
    """The modules and parameters that patterns name, without those inside of them.

    Args:
        patterns: Names, or patterns of `fnmatch`, in which a star also stands for dots. "backbone"
            is all but `heads`, unless a module has this name.
        key: Of the config, for the message.

    Raises:
        UserError: A pattern names nothing.
    """
    modules = [name for name, _ in network.named_modules() if name]
    names = [*modules, *(name for name, _ in network.named_parameters())]
    found: set[str] = set()
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if pattern == BACKBONE and not matching and heads:
            matching = [name for name, _ in network.named_parameters() if not inside(name, heads)]
            matching += [name for name in modules if _apart(name, heads)]
        if not matching:
            first = ", ".join(name for name, _ in network.named_children())
            what = f"{type(network).__name__} has no module or parameter {pattern!r}"
            # A name for the whole of it is no name that it has.
            near = closest_pattern(pattern, [*names, BACKBONE] if heads else names)
            raise UserError.at(
                key,
                what=what,
                remedy=f"did you mean {near}?" if near else f"its parts are {first}",
                code="incomplete",
            )
        found.update(matching)
    return found


def _apart(name: str, parts: Iterable[str]) -> bool:
    """Whether nothing of `parts` is at or below a name, nor the name below one of them."""
    return not inside(name, parts) and not any(part.startswith(f"{name}.") for part in parts)


def layers_of(network: nn.Module, heads: Sequence[str]) -> dict[str, list[str]]:
    """The network's layers in the order of forward, by the names of their parameters.

    The layers are those of timm's networks (`group_matcher`), the blocks of a chain (`blocks_of`),
    or else the network's children, of which repeated blocks are layers of their own. A norm belongs
    to the layer before it, and the head is the last layer.

    Args:
        heads: What belongs to the last layer, wherever it stands.
    """
    parameters = [name for name, _ in network.named_parameters()]
    if hasattr(network, "group_matcher"):
        # Imported by now, as it is a network of timm's.
        from timm.models import group_parameters

        matcher: Any = network.group_matcher
        numbers = group_parameters(network, matcher(coarse=False), reverse=True)
        together: dict[int, list[str]] = {}
        for name in parameters:
            together.setdefault(numbers[name], []).append(name)
        layers = {_common(names): names for _, names in sorted(together.items())}
    else:
        layers = _in_order(network, parameters)
    last = [name for name in parameters if inside(name, heads)]
    kept = {layer: [name for name in names if name not in last] for layer, names in layers.items()}
    ordered = {layer: names for layer, names in kept.items() if names}
    return {**ordered, ", ".join(heads): last} if last else ordered


def heads_of_module(module: nn.Module, network: nn.Module) -> tuple[str, ...]:
    """As `heads_of`, for the network of a module, which may know its number of classes."""
    count = getattr(module, "num_classes", None)
    return heads_of(network, count if isinstance(count, int) else None)


def layers_in(module: nn.Module) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """The layers of a LightningModule, in order, and which of them are the head.

    The head of a module or network with a part `backbone` is all that is outside of it.
    """
    network = getattr(module, "network", None)
    prefix = "" if network is None else "network."
    inner = network if isinstance(network, nn.Module) else module
    if not all(name.startswith(prefix) for name, _ in module.named_parameters()):
        inner = module
        prefix = ""
    heads = heads_of_module(module, inner)
    backbone = part_of(inner, BACKBONE)
    if backbone is None:
        layers = layers_of(inner, heads)
        heads = (", ".join(heads),) if heads else ()
    else:
        path = BACKBONE if part_of(backbone, "body") is None else f"{BACKBONE}.body"
        within = layers_of(inner.get_submodule(path), ())
        layers = {f"{path}.{k}": [f"{path}.{n}" for n in names] for k, names in within.items()}
        rest = [name for name, _ in inner.named_parameters() if not inside(name, [path])]
        heads = ("head",) if rest else ()
        layers |= {"head": rest} if rest else {}
    return {k: [f"{prefix}{name}" for name in names] for k, names in layers.items()}, heads


def _common(names: Sequence[str]) -> str:
    """What the first of these parameters and those beside it have in common: a layer's name."""
    first = names[0].partition(".")[0]
    modules = [n.split(".")[:-1] for n in names if n.partition(".")[0] == first]
    same = []
    for parts in zip(*modules, strict=False):
        if len({*parts}) > 1:
            break
        same.append(parts[0])
    return ".".join(same) or first


def _in_order(network: nn.Module, parameters: Sequence[str]) -> dict[str, list[str]]:
    """The layers of a network that does not state them."""
    modules = dict(network.named_modules())
    try:
        units = [name for name, _ in blocks_of(network) if name is not None]
    except (UserError, AttributeError):
        units = [*_opened(network, "")]
    layers: dict[str, list[str]] = {}
    taken: set[str] = set()
    for unit in units:
        own = [name for name in parameters if inside(name, [unit]) and name not in taken]
        taken.update(own)
        joins = layers and unit in modules and is_norm(modules[unit])
        if own:
            layers.setdefault([*layers][-1] if joins else unit, []).extend(own)
    # Parameters of the network itself, such as a class token, enter with the first layer.
    own = [name for name in parameters if name not in taken]
    first = next(iter(layers), "")
    return {first: [*own, *layers.pop(first, [])], **layers} if own else layers


def _opened(module: nn.Module, prefix: str) -> Iterator[str]:
    """The children in order; what holds repeated blocks is opened."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if _repeats(child) or any(_repeats(each) for each in child.modules()):
            yield from _opened(child, f"{path}.")
        else:
            yield path


def _repeats(module: nn.Module) -> bool:
    """Whether a module is a list of two blocks or more of one class, with weights."""
    kinds = [type(each) for each in module.children()]
    return (
        isinstance(module, LISTS)
        and len(kinds) > 1
        and len({*kinds}) == 1
        and next(module.parameters(), None) is not None
    )
