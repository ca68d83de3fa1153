"""Loads initial weights from a file: torchvision's, timm's, or another run's."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import nn

from distdl.checkpoint import formats
from distdl.util.errors import UserError

log = logging.getLogger(__name__)

# Prefixes of a network's names in checkpoints: from ImageClassifier, DDP, torch.compile.
PREFIXES = ("network.", "module.", "_orig_mod.")


def load_weights(network: nn.Module, file: str | Path) -> None:
    """Loads every weight and buffer of `network` by name.

    A layer for another number of classes keeps its initial values, with a warning.

    Args:
        network: Changed in place.
        file: `.pth`, `.safetensors`, or any checkpoint of distdl or Lightning.

    Raises:
        UserError: There is no such file, or its weights belong to another network.
    """
    path = Path(file)
    if not path.exists():
        raise UserError.at("model.weights", f"no such file: {file}")
    given = formats.read(path)["state_dict"]
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in given):
            given = {name.removeprefix(prefix): value for name, value in given.items()}
    own = network.state_dict()
    other = [k for k in own if k in given and own[k].shape != given[k].shape]
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or unknown or len({name.rpartition(".")[0] for name in other}) > 1:
        shown = ", ".join([*other, *missing, *unknown][:3])
        what = f"{file} holds the weights of another network than {type(network).__name__}: {shown}"
        raise UserError.at("model.weights", what, "choose the model that it was made with")
    if other:
        log.warning("not from %s, since its shape is another: %s", file, ", ".join(other))
    network.load_state_dict({k: v for k, v in given.items() if k not in other}, strict=False)
