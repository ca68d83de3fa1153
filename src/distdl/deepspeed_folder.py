"""Reading the folders that DeepSpeed writes, without an engine and at any world size.

A folder holds, below its tag, the model states (buffers, shapes by name, what the trainer added)
and for each rank the optimizer states: flat partitions, as `distdl.strategies.deepspeed_state`
describes. DeepSpeed's `zero_to_fp32` merges the weights; the optimizer's states lie in the same
order.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distdl.errors import Problem, UserError

TRAINER = "lightning"  # our key for what the Trainer keeps beside weights and optimizer states
# The same in folders that Lightning itself wrote, where it lies among DeepSpeed's own keys.
LIGHTNINGS = (
    *("epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "lr_schedulers"),
    *("hyper_parameters", "datamodule_hyper_parameters"),
)


def is_one(path: Path) -> bool:
    return (path / "latest").is_file() or any(path.glob("*/*_model_states.pt"))


def read(path: Path) -> dict[str, Any]:
    """A folder as one portable checkpoint, in host memory. Its pickles are trusted.

    Args:
        path: The folder above the tag.

    Raises:
        UserError: DeepSpeed is not installed, or a rank's file is missing.
    """
    if "deepspeed" not in sys.modules:  # nothing here needs a GPU, and it asks for one
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError as error:
        what = "was written by DeepSpeed, which is not installed"
        raise UserError(Problem(str(path), what, "pip install 'distdl[deepspeed]'")) from error
    latest = path / "latest"
    tag = latest.read_text().strip() if latest.is_file() else next(path.glob("*/*.pt")).parent.name
    models = ranked(path / tag, "*_model_states.pt")
    parts = [loaded(file)["optimizer_state_dict"] for file in ranked(path / tag, "*_optim_*.pt")]
    if not parts:
        raise UserError(Problem(str(path), "holds no optimizer states of ZeRO", "stage 1, 2 or 3"))
    state = loaded(models[0])
    found = dict(state.get(TRAINER) or {k: state[k] for k in LIGHTNINGS if k in state})
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            weights = get_fp32_state_dict_from_zero_checkpoint(str(path), tag)
        except ValueError as error:  # a rank's file is missing
            raise UserError(Problem(str(path), str(error))) from error
    names = [name for name in state["module"] if name in weights]
    found["state_dict"] = {name: weights[name].detach() for name in names or weights}
    found["optimizer_states"] = [optimizer_state(parts, state["param_shapes"])]
    return found


def ranked(folder: Path, pattern: str) -> list[Path]:
    """Files in the order of the ranks in their names."""
    return sorted(
        folder.glob(pattern), key=lambda file: [int(n) for n in re.findall(r"\d+", file.name)]
    )


def loaded(file: Path) -> dict[str, Any]:
    # They hold objects of DeepSpeed's, which weights_only does not know.
    return torch.load(file, map_location="cpu", weights_only=False, mmap=True)


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
