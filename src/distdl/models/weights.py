"""Loads initial weights from a file: torchvision's, timm's, or another run's."""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path

from torch import nn

from distdl.checkpoint import formats
from distdl.checkpoint.convert import plain_weights
from distdl.util.errors import UserError
from distdl.util.wording import first_few

log = logging.getLogger(__name__)


def read_published_without_code() -> None:
    """Makes torchvision, once it is imported, read its published weights as tensors alone. It would
    unpickle whatever has their name in $TORCH_HOME, and checks a hash only when it downloads."""
    api = sys.modules.get("torchvision.models._api")
    load = getattr(api, "load_state_dict_from_url", None)
    if api and load and not isinstance(load, functools.partial):
        api.__dict__["load_state_dict_from_url"] = functools.partial(load, weights_only=True)


def load_weights(network: nn.Module, file: str | Path) -> None:
    """Loads every weight and buffer of `network` by name, in place.

    A layer for another number of classes keeps its initial values, with a warning.

    Args:
        file: `.pth`, `.safetensors`, or any checkpoint of distdl or Lightning.

    Raises:
        UserError: There is no such file, or its weights belong to another network.
    """
    if not Path(file).exists():
        raise UserError.at("model.weights", f"no such file: {file}", code="not-found")
    weights = plain_weights(formats.read(Path(file))["state_dict"])
    named = network.state_dict()
    other = [k for k in named if k in weights and named[k].shape != weights[k].shape]
    missing = sorted(named.keys() - weights.keys())
    unknown = sorted(weights.keys() - named.keys())
    if missing or unknown or len({name.rpartition(".")[0] for name in other}) > 1:
        shown = first_few([*other, *missing, *unknown])
        what = f"{file} holds the weights of another network than {type(network).__name__}: {shown}"
        raise UserError.at(
            "model.weights", what, "choose the model that the weights belong to", code="mismatch"
        )
    if other:
        log.warning("not loaded from %s, because the shapes differ: %s", file, ", ".join(other))
    network.load_state_dict({k: v for k, v in weights.items() if k not in other}, strict=False)
