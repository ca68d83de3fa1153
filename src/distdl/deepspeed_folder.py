"""Reading the folders that DeepSpeed writes, without an engine and at any world size.

A folder holds, below its tag, the model states (buffers, shapes by name, what the trainer added)
and for each rank the optimizer states: flat partitions, as `distdl.strategies.deepspeed_state`
describes, among them the weights in 32 bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distdl.errors import Problem, UserError

FP32 = "single_partition_of_fp32_groups"
TRAINER = "lightning"  # our key for what the Trainer keeps beside weights and optimizer states
# The same in folders that Lightning itself wrote, where it lies among DeepSpeed's own keys.
LIGHTNINGS = (
    *("epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "lr_schedulers"),
    *("hyper_parameters", "datamodule_hyper_parameters"),
)


def is_one(path: Path) -> bool:
    return (path / "latest").is_file() or any(path.glob("*/*_model_states.pt"))


def read(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """A folder as one portable checkpoint, in host memory.

    DeepSpeed's own objects in it (loss scalers, enums) are read as `Inert`; none of its code runs,
    nor does it have to be installed.

    Args:
        path: The folder above the tag.
        trust: Let its files run code while they are unpickled, where they hold other objects.

    Raises:
        UserError: A rank's file is missing, or one of them holds other objects and is not trusted.
    """
    latest = path / "latest"
    tag = latest.read_text().strip() if latest.is_file() else next(path.glob("*/*.pt")).parent.name
    models = [loaded(file, trust) for file in ranked(path / tag, "*_model_states.pt")]
    optimizers = ranked(path / tag, "*_optim_*.pt")
    parts = [loaded(file, trust)["optimizer_state_dict"] for file in optimizers]
    if not parts:
        raise UserError(Problem(str(path), "holds no optimizer states of ZeRO", "stage 1, 2 or 3"))
    counts = parts[0].get("partition_count", len(parts))
    count = max(counts) if isinstance(counts, list) else counts
    if count != len(parts) or not models:
        what = f"holds the optimizer states of {len(parts)} ranks, and {count} have written them"
        raise UserError(Problem(str(path), what))
    state = models[0]
    found = dict(state.get(TRAINER) or {k: state[k] for k in LIGHTNINGS if k in state})
    found["state_dict"] = weights(models, parts)
    found["optimizer_states"] = [optimizer_state(parts, state["param_shapes"])]
    return found


def weights(
    models: Sequence[Mapping[str, Any]], parts: Sequence[Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    """The whole weights in 32 bit, and the buffers, in the module's order.

    As DeepSpeed's `zero_to_fp32` puts them together.

    Args:
        models: Each rank's model states; only rank 0's, below stage 3.
        parts: Each rank's optimizer states.
    """
    state, partitioned = models[0], int(parts[0]["zero_stage"]) == 3
    found: dict[str, torch.Tensor] = {}
    for name in state.get("buffer_names", ()):
        value = state["module"][name]
        found[name] = value.float() if value.is_floating_point() else value
    for name, shape in (state.get("frozen_param_shapes") or {}).items():
        pieces = [model["frozen_param_fragments"][name] for model in models]
        whole = torch.cat([p.reshape(-1) for p in pieces]) if partitioned else pieces[0]
        found[name] = whole.reshape(-1)[: shape.numel()].view(shape)
    flats = [part["fp32_flat_groups" if partitioned else FP32] for part in parts]
    paddings = parts[0].get("param_alignment_paddings") or [()] * len(state["param_shapes"])
    for index, own in enumerate(state["param_shapes"]):
        group = [rank[index] for rank in flats]
        cut = by_parameter(group, own) if partitioned else in_turn(group, own, paddings[index])
        found.update((name, piece.detach()) for name, piece in cut)
    for name, same in dict(state.get("shared_params") or ()).items():
        if same in found:
            found[name] = found[same]
    order = [*(name for name in state["module"] if name in found), *found]
    return {name: found[name] for name in dict.fromkeys(order)}


def ranked(folder: Path, pattern: str) -> list[Path]:
    """Files in the order of the ranks in their names."""
    return sorted(
        folder.glob(pattern), key=lambda file: [int(n) for n in re.findall(r"\d+", file.name)]
    )


def loaded(file: Path, trust: bool) -> dict[str, Any]:
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    theirs = [name for name in names if name.startswith("deepspeed.")]
    if trust and len(theirs) < len(names):
        return torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    with torch.serialization.safe_globals([(Inert, name) for name in theirs]):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


class Inert:
    """Stands for an object of DeepSpeed's, and does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __int__(self) -> int:  # a member of an enum, made from its value
        return int(self.values[0])


def optimizer_state(
    parts: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, torch.Size]]
) -> dict[str, Any]:
    """The optimizer's state by name.

    Args:
        parts: Each rank's.
        shapes: Of the parameters in each flat tensor, in their order: of a group in stages 1 and 2,
            of a part of one in stage 3.
    """
    partitioned = int(parts[0]["zero_stage"]) == 3  # each parameter, not the flat tensor
    base = [
        part["optimizer_state_dict" if partitioned else "base_optimizer_state"] for part in parts
    ]
    paddings = parts[0].get("param_alignment_paddings") or [()] * len(shapes)
    state: dict[str, Any] = {}
    for index, own in enumerate(shapes):
        for key, value in base[0]["state"].get(index, {}).items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                for name in own:
                    state.setdefault(name, {})[key] = value
                continue
            flats = [rank["state"][index][key] for rank in base]
            cut = by_parameter(flats, own) if partitioned else in_turn(flats, own, paddings[index])
            for name, piece in cut:
                state.setdefault(name, {})[key] = piece
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [name for index in group["params"] for name in shapes[index]],
        }
        for group in base[0]["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def in_turn(
    flats: Sequence[torch.Tensor], own: Mapping[str, torch.Size], paddings: Sequence[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stages 1 and 2: one flat tensor, cut into the ranks' partitions."""
    whole, at = torch.cat(list(flats)), 0
    for number, (name, shape) in enumerate(own.items()):
        yield name, whole[at : at + shape.numel()].view(shape).clone()
        at += shape.numel() + (paddings[number] if paddings else 0)


def by_parameter(
    flats: Sequence[torch.Tensor], own: Mapping[str, torch.Size]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stage 3: every parameter cut into the ranks' parts, the last of which is padded."""
    at = 0
    for name, shape in own.items():
        size = math.ceil(shape.numel() / len(flats))
        yield name, torch.cat([f[at : at + size] for f in flats])[: shape.numel()].view(shape)
        at += size
