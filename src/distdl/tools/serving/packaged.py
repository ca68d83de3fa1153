"""A network that is no graph: weights, and the code that builds it. This file goes into every model
folder.

Whoever loads such a folder runs its code, so `distdl serve` asks for consent first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

WEIGHTS = "model.safetensors"
# Modules of the network's own, in the folder.
CODE = "code"
TARGET = "_target_"
RUNS_CODE = (
    "holds weights and the code of their network, which would run here: "
    "Scorer(folder, trust=True) if you would run code of whoever wrote it"
)


class RunsCode(ValueError):
    """A folder would run its own code, and nobody has agreed to that."""


def refuse_other_words(description: Mapping[str, Any], name: str) -> None:
    """Raises ValueError unless `runs_code` in the description is true of the model's file."""
    needs = name == WEIGHTS
    said = description.get("runs_code", False)
    if said is not needs:
        raise ValueError(f"model.json says runs_code: {said!r:.20}, and the model is {name}")
    if needs and not isinstance(description.get("network"), dict):
        raise ValueError(f"{name} are weights alone: model.json names no network")


def loaded(
    folder: Path, description: Mapping[str, Any], weights: bytes, network: nn.Module | None
) -> nn.Module:
    """The network of a folder with its weights, in float32, for inference.

    Args:
        weights: The content of `WEIGHTS`.
        network: Built already; None: by the folder's code.

    Raises:
        Exception: Whatever the code raises; ValueError or RuntimeError: the weights are of another
            network.
    """
    from safetensors.torch import load

    if network is None:
        for path in (folder / CODE, folder):
            if str(path.resolve()) not in sys.path:
                sys.path.insert(0, str(path.resolve()))
        network = built(description["network"])
    if not isinstance(network, nn.Module):
        raise ValueError(f"the network is a {type(network).__name__}")
    network.load_state_dict(load(weights))
    return network.float().eval().requires_grad_(False)


def built(node: object) -> Any:  # noqa: ANN401 - whatever the node names
    """What a node with `_target_` makes, and the nodes in it, as Hydra's `instantiate` does."""
    if isinstance(node, list):
        return [built(each) for each in node]
    if not isinstance(node, dict):
        return node
    values = {key: built(value) for key, value in node.items() if key != TARGET}
    if TARGET not in node:
        return values
    module, _, name = str(node[TARGET]).rpartition(".")
    called: Any = getattr(importlib.import_module(module), name)
    return called(**values)
