"""Reads DeepSpeed's checkpoint folders, without an engine and at any world size.

The subfolder named by the tag holds the model states (buffers, shapes by name, the Trainer's
state) and the optimizer states of each rank. These are flat partitions, described in
`distdl.strategies.deepspeed_state`, and include the float32 weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distdl.checkpoint import enum_members
from distdl.util.errors import UserError

# DeepSpeed's ZeroStageEnum.
STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
FP32 = "single_partition_of_fp32_groups"
TRAINER = "lightning"  # our key for the Trainer's other state
# In folders that Lightning itself wrote, these keys of that state are among DeepSpeed's own.
LIGHTNING_KEYS = (
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "loops",
    "callbacks",
    "lr_schedulers",
    "hyper_parameters",
    "datamodule_hyper_parameters",
)


def is_one(path: Path) -> bool:
    return (path / "latest").is_file() or any(path.glob("*/*_model_states.pt"))


def read(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Reads a folder as one portable checkpoint, in host memory. None of DeepSpeed's code runs, and
    it does not have to be installed: its own objects (loss scalers, enums) are read as `Inert`.

    Args:
        path: The folder above the tag.
        trust: Let files with other objects run code while they are unpickled.

    Raises:
        UserError: A rank's file is missing, or a file holds other objects and is not trusted.
    """
    latest = path / "latest"
    tag = latest.read_text().strip() if latest.is_file() else next(path.glob("*/*.pt")).parent.name
    models = [loaded(file, trust) for file in ranked(path / tag, "*_model_states.pt")]
    optimizers = ranked(path / tag, "*_optim_*.pt")
    parts = [loaded(file, trust)["optimizer_state_dict"] for file in optimizers]
    if not parts:
        raise UserError.at(
            str(path), what="holds no optimizer states of ZeRO stage 1, 2 or 3", code="incomplete"
        )
    counts = parts[0].get("partition_count", len(parts))
    count = max(counts) if isinstance(counts, list) else counts
    if count != len(parts) or not models:
        raise UserError.at(
            str(path),
            what=f"holds the optimizer states of {len(parts)} ranks, but {count} ranks wrote them",
            code="mismatch",
        )
    state = models[0]
    checkpoint = dict(state.get(TRAINER) or {k: state[k] for k in LIGHTNING_KEYS if k in state})
    checkpoint["state_dict"] = weights(models, parts)
    checkpoint["optimizer_states"] = [optimizer_state(parts, state["param_shapes"])]
    return checkpoint


def weights(
    models: Sequence[Mapping[str, Any]], parts: Sequence[Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    """The full float32 weights and the buffers, in the module's order, merged as in DeepSpeed's
    `zero_to_fp32`. Below stage 3, `models` has only rank 0's states."""
    state = models[0]
    stage_3 = is_stage_3(parts)
    tensors: dict[str, torch.Tensor] = {}
    for name in state.get("buffer_names", ()):
        value = state["module"][name]
        tensors[name] = value.float() if value.is_floating_point() else value
    for name, shape in (state.get("frozen_param_shapes") or {}).items():
        pieces = [model["frozen_param_fragments"][name] for model in models]
        flat = torch.cat([p.reshape(-1) for p in pieces]) if stage_3 else pieces[0]
        tensors[name] = flat.reshape(-1)[: shape.numel()].view(shape)
    flats = [part["fp32_flat_groups" if stage_3 else FP32] for part in parts]
    for index, shapes in enumerate(state["param_shapes"]):
        pieces_of_group = cut([rank[index] for rank in flats], shapes, parts, index)
        tensors.update((name, piece.detach()) for name, piece in pieces_of_group)
    for name, same in dict(state.get("shared_params") or ()).items():
        if same in tensors:
            tensors[name] = tensors[same]
    order = [*(name for name in state["module"] if name in tensors), *tensors]
    return {name: tensors[name] for name in dict.fromkeys(order)}


def ranked(folder: Path, pattern: str) -> list[Path]:
    """Files sorted by the ranks in their names."""
    return sorted(folder.glob(pattern), key=lambda f: [*map(int, re.findall(r"\d+", f.name))])


def loaded(file: Path, trust: bool) -> dict[str, Any]:
    found = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    names = [name for name in found if name != enum_members.GETATTR]
    replaced = [name for name in names if name.startswith("deepspeed.")]
    if trust and len(replaced) < len(names):
        return torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    inert = torch.serialization.safe_globals([(Inert, name) for name in replaced])
    with inert, enum_members.allowed(member):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


class Inert:
    """Replaces an object of DeepSpeed's when unpickled; has no behaviour."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __int__(self) -> int:  # a member of an enum, made from its value
        number = self.values[0]
        if not isinstance(number, int):
            raise TypeError(f"{number!r} is not the number of a stage")
        return number


def member(cls: object, name: object) -> object:
    """As `enum_members.member`, also of DeepSpeed's own enums."""
    if cls is Inert:
        return Inert(STAGES.get(str(name)))
    return enum_members.member(cls, name)


def optimizer_state(
    parts: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, torch.Size]]
) -> dict[str, Any]:
    """The optimizer's state by name, from each rank's states. `shapes` has the parameters' shapes
    for each flat tensor: one per group in stages 1 and 2, one per part of a group in stage 3."""
    key_of_states = "optimizer_state_dict" if is_stage_3(parts) else "base_optimizer_state"
    base = [part[key_of_states] for part in parts]
    state: dict[str, Any] = {}
    for index, names in enumerate(shapes):
        for key, value in base[0]["state"].get(index, {}).items():
            flats = [rank["state"][index][key] for rank in base]
            is_flat = isinstance(value, torch.Tensor) and value.dim() > 0
            values = cut(flats, names, parts, index) if is_flat else ((n, value) for n in names)
            for name, each in values:
                state.setdefault(name, {})[key] = each
    groups = [
        {**group, "params": [name for index in group["params"] for name in shapes[index]]}
        for group in base[0]["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def is_stage_3(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each parameter is partitioned by itself, not the flat tensor of a group."""
    return int(parts[0]["zero_stage"]) == 3


def cut(
    flats: Sequence[torch.Tensor],
    shapes: Mapping[str, torch.Size],
    parts: Sequence[Mapping[str, Any]],
    index: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of the group `index`, by name. `flats` are the ranks' partitions of its flat
    tensor, `shapes` those of the parameters in order, and `parts` the ranks' optimizer states."""
    at = 0
    if is_stage_3(parts):  # each parameter has one part per rank; the last part is padded
        for name, shape in shapes.items():
            size = math.ceil(shape.numel() / len(flats))
            yield name, torch.cat([f[at : at + size] for f in flats])[: shape.numel()].view(shape)
            at += size
        return
    flat = torch.cat(list(flats))
    paddings = (parts[0].get("param_alignment_paddings") or {index: ()})[index]
    for number, (name, shape) in enumerate(shapes.items()):
        yield name, flat[at : at + shape.numel()].view(shape).clone()
        at += shape.numel() + (paddings[number] if paddings else 0)
