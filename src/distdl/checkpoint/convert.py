"""Writes checkpoints for `convert`, and checks that the written file equals the source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distdl.checkpoint import formats
from distdl.runs.checkpoints import CheckpointStore
from distdl.util.atomic_files import write_bytes

# With Lightning's weight averaging, "state_dict" holds the average, this key the trained weights.
BEHIND_THE_AVERAGE = "current_model_state"
# Prefixes of a network's names in checkpoints: from ImageClassifier, DDP, torch.compile.
PREFIXES = ("network.", "module.", "_orig_mod.")
# Parts besides weights and optimizer state, with their names for the user.
PARTS = {
    "lr_schedulers": "schedulers",
    "loops": "loops",
    "callbacks": "state of the callbacks",
    BEHIND_THE_AVERAGE: "weights behind the average (EMA)",
    "distdl": "position in the data",
}


def load_trusted(source: Path) -> dict[str, Any]:
    """Reads a checkpoint that may run code, and converts it to a form that needs none."""
    return formats.plain(formats.load(source, weights_only=False))[0]


def plain_weights(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The network's own weights, without prefixes that all of their names have."""
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return dict(state)


def write_weights(weights: Mapping[str, torch.Tensor], target: Path) -> None:
    if target.suffix == ".safetensors":
        from safetensors.torch import save

        write_bytes(target, save({name: value.contiguous() for name, value in weights.items()}))
    else:
        torch.save(dict(weights), target)


def write_checkpoint(checkpoint: Mapping[str, Any], source: Path, target: Path) -> None:
    store = CheckpointStore(target.parent)
    torch.save(checkpoint, store.temporary(target.name))
    store.publish(target.name, step=checkpoint.get("global_step"), converted_from=str(source))


def compare_all(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """Checks that all parts are equal; returns the number of tensors in each part."""
    weights, statistics = split(before["state_dict"])
    compared = {"weights": compare(weights, split(after["state_dict"])[0], "weights")}
    if statistics:
        label = "batch norm statistics"
        compared[label] = compare(statistics, split(after["state_dict"])[1], label)
    label = "optimizer state"
    compared[label] = compare(before["optimizer_states"], after["optimizer_states"], label)
    for key, label in PARTS.items():
        if key in before:
            compared[label] = compare(before[key], after[key], label)
    rest = before.keys() - {"state_dict", "optimizer_states", *PARTS}
    compared["everything else"] = sum(compare(before[k], after[k], k) for k in sorted(rest))
    return compared


def split(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a state into weights and batch norm's running statistics."""
    last = ("running_mean", "running_var", "num_batches_tracked")
    statistics = {k: v for k, v in state.items() if k.rpartition(".")[2] in last}
    return {k: v for k, v in state.items() if k not in statistics}, statistics


def compare(before: object, after: object, path: str) -> int:
    """Compares two nested containers bit by bit; returns their number of tensors. Raises a
    RuntimeError with the path of the first difference."""
    if isinstance(before, torch.Tensor):
        if not isinstance(after, torch.Tensor) or not same_bits(before, after):
            raise RuntimeError(f"the written file differs from the source: {path}")
        return 1
    if isinstance(before, Mapping):
        if not isinstance(after, Mapping) or before.keys() != after.keys():
            raise RuntimeError(f"the written file has other keys than the source: {path}")
        return sum(compare(before[k], after[k], f"{path}.{k}") for k in before)
    if isinstance(before, list | tuple):
        if not isinstance(after, list | tuple) or len(before) != len(after):
            raise RuntimeError(f"the written file has a list of another length: {path}")
        pairs = enumerate(zip(before, after, strict=True))
        return sum(compare(a, b, f"{path}[{i}]") for i, (a, b) in pairs)
    if before != after and not (before is after or before != before):
        raise RuntimeError(f"the written file differs from the source: {path}")
    return 0


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether type, shape and bytes are equal: NaN equals itself, and 0.0 differs from -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(raw(one), raw(other))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
