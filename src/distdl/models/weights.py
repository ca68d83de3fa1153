"""Loads initial weights from a file: torchvision's, timm's, or another run's."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distdl.checkpoint import formats
from distdl.checkpoint.adapters import refuse_adapters
from distdl.checkpoint.convert import plain_weights
from distdl.checkpoint.settled import refuse_unsettled
from distdl.config.recipe import is_own
from distdl.models.parts import heads_of, inside
from distdl.runs.checkpoints import located
from distdl.util.errors import UserError
from distdl.util.wording import first_few

log = logging.getLogger(__name__)

NEW = "new"  # of `model.head`
COUNTED = "num_batches_tracked"


def read_published_without_code() -> None:
    """Makes torchvision, once it is imported, read its published weights as tensors alone. It would
    unpickle whatever has their name in $TORCH_HOME, and checks a hash only when it downloads."""
    api = sys.modules.get("torchvision.models._api")
    load = getattr(api, "load_state_dict_from_url", None)
    if api and load and not isinstance(load, functools.partial):
        api.__dict__["load_state_dict_from_url"] = functools.partial(load, weights_only=True)


@dataclass(frozen=True)
class Taken:
    """What a network takes of a file's weights, by name, with shapes.

    Args:
        taken: Of the network.
        new: Of the network, which keep their initial values.
        left: Of the file.
        misfits: What must fit and does not, in a few words each; empty: the file may be loaded.
    """

    taken: list[str]
    new: list[str]
    left: list[str]
    misfits: list[str]

    @classmethod
    def of(
        cls,
        own: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        heads: Collection[str] | None,
    ) -> Taken:
        """Compares names and shapes.

        Args:
            own: Of the network; may be on `meta`.
            heads: Layers that are not taken from the file. None: all are, but one layer may have
                another size.
        """
        apart = heads or ()
        wanted = {name: value for name, value in own.items() if not inside(name, apart)}
        given = {name: value for name, value in weights.items() if not inside(name, apart)}
        # Files from before torch 0.4.1 have no such counters, and torch's own norms need none.
        missing = sorted(n for n in wanted.keys() - given.keys() if not n.endswith(COUNTED))
        unknown = sorted(given.keys() - wanted.keys())
        other = [n for n in wanted if n in given and wanted[n].shape != given[n].shape]
        one_layer = len({name.rpartition(".")[0] for name in other}) <= 1
        taken = [name for name in wanted if name in given and name not in other]
        fits = not missing and not unknown and one_layer and heads is None
        shapes = [f"{n} {[*given[n].shape]} in place of {[*wanted[n].shape]}" for n in other]
        differing = {"has": shapes, "lacks": missing, "also has": unknown}
        misfits = [f"it {word} {first_few(names)}" for word, names in differing.items() if names]
        if fits and taken:
            misfits = []
        new = [_sized(name, value) for name, value in own.items() if name not in taken]
        left = [_sized(name, value) for name, value in weights.items() if name not in taken]
        if not taken and not misfits:
            misfits = ["it has none of the network's weights"]
        return cls(taken, [n for n in new if COUNTED not in n], left, misfits)

    def said(self, file: str | Path, count: int) -> str:
        """How many of the network's `count` weights are from the file, and which are not."""
        parts = [f"new: {_listed(self.new)}", f"left in the file: {_listed(self.left)}"]
        counts = f"{len(self.taken)} of {count} weights and buffers are from {file}"
        return f"model.weights: {counts}; {'; '.join(parts)}"


def _sized(name: str, value: torch.Tensor) -> str:
    return f"{name} {[*value.shape]}"


def starting_keys(node: Mapping[Any, Any]) -> list[str]:
    """The keys of a model's node by which it loads a file of weights: without them it is built for
    a checkpoint that has all of them. The file may be gone by then, or be another one. A class of
    somebody else's keeps its own arguments."""
    is_ours = is_own(node.get("_target_"))
    return [key for key in ("weights", "head") if is_ours and key in node]


def read_weights(file: str | Path) -> dict[str, torch.Tensor]:
    """The weights of a file or run by their names in a network. They are mapped, not read.

    Raises:
        UserError: There is no such file, it cannot be read, or it is one to go on from alone.
    """
    path = located(file)
    checkpoint = formats.read(path, mmap=True)
    refuse_adapters(checkpoint, str(path))
    refuse_unsettled(checkpoint, str(path))
    return plain_weights(checkpoint["state_dict"])


def fit_to(
    network: nn.Module,
    file: str | Path,
    weights: Mapping[str, torch.Tensor],
    head: str | None = None,
    classes: int | None = None,
) -> Taken:
    """What `network` takes of the weights; the arguments are those of `load_weights`.

    Raises:
        UserError: The weights belong to another network, or the network has no known head.
    """
    heads = heads_of(network, classes) if head == NEW else None
    kind = type(network).__name__
    if heads == ():
        raise UserError.at(
            "model.head",
            what=f"no layer of {kind} has {classes} outputs, as a head of {classes} classes has",
            remedy="model.head=null, and a network whose last layer has model.num_classes outputs",
            code="mismatch",
        )
    fit = Taken.of(network.state_dict(), weights, heads)
    if fit.misfits:
        raise UserError.at(
            "model.weights",
            what=(
                f"{file} holds the weights of another network than {kind}: {'; '.join(fit.misfits)}"
            ),
            remedy="choose the model that the weights belong to",
            code="mismatch",
        )
    refuse_broken(file, {name: weights[name] for name in fit.taken})
    return fit


def refuse_broken(file: str | Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises a UserError if some values are NaN or infinite: nothing could be trained from them."""
    wrong = [name for name, value in weights.items() if not torch.isfinite(value).all()]
    if wrong:
        raise UserError.at(
            "model.weights",
            what=f"{file} has NaN or infinite values in {first_few(wrong)}",
            remedy="weights of a training that did not diverge",
            code="damaged-file",
        )


def load_weights(
    network: nn.Module, file: str | Path, head: str | None = None, classes: int | None = None
) -> None:
    """Loads every weight and buffer of `network` by name, in place.

    A layer for another number of classes keeps its initial values, with a warning.

    Args:
        file: `.pth`, `.safetensors`, any checkpoint of distdl or Lightning, or a run (`located`).
        head: "new": the head keeps its initial values, whatever the file has; how many weights were
            taken is logged.
        classes: The number of outputs by which the head is known (`parts.heads_of`).

    Raises:
        UserError: There is no such file, or its weights belong to another network.
    """
    file = located(file)
    weights = read_weights(file)
    fit = fit_to(network, file, weights, head, classes)
    if head == NEW:
        log.info("%s", fit.said(file, len(network.state_dict())))
    elif fit.new:
        names = ", ".join(name.partition(" ")[0] for name in fit.new)
        log.warning("not loaded from %s, because the shapes differ: %s", file, names)
    network.load_state_dict({name: weights[name] for name in fit.taken}, strict=False)


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "none"
