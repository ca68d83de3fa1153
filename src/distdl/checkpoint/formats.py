"""Reads a checkpoint of any form as one portable dict (see `distdl.checkpoint.portable`):

- a file: Lightning's layout, or bare weights (`.pth` of torchvision and timm, `.safetensors`);
- a folder of torch's distributed checkpoint, which `checkpoint.sharded=true` writes under FSDP;
- a folder of DeepSpeed's.

Reading runs no code from the checkpoint unless the user allows it (`checkpoint.trust_pickle`).
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

from distdl.checkpoint import enum_members
from distdl.checkpoint.hyper_parameters import described
from distdl.checkpoint.plain_state import TRUST, Packing, restored
from distdl.util.errors import Problem, UserError

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
TYPES = ("hparams_type", "datamodule_hparams_type")  # their classes, which `described` drops


class AnyCheckpoint(TorchCheckpointIO):
    """Reads every form, and writes files as Lightning does, unless `intercept` returns True for a
    checkpoint (see `distdl.checkpoint.saving`)."""

    intercept: Callable[[dict[str, Any]], bool] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: object = None
    ) -> None:
        if self.intercept is None or not self.intercept(checkpoint):
            super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: _PATH, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return load(Path(path), weights_only=weights_only)


def plain(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A checkpoint from Lightning's `dump_checkpoint` in a form that loads with weights_only, and a
    list of its pickles (`Packing.pickled`). Raises a UserError if an object cannot be saved."""
    packing = Packing()
    new = {
        key: described(value) if key in HYPER_PARAMETERS else packing.pack(value, key)
        for key, value in checkpoint.items()
        if key not in TYPES
    }
    return new, packing.pickled


def load(path: Path, *, weights_only: bool | None = True, mmap: bool = False) -> dict[str, Any]:
    """As `read`, with all state restored (`plain_state.restored`) for a resume."""
    checkpoint = read(path, weights_only=weights_only, mmap=mmap)
    checkpoint.setdefault("pytorch-lightning_version", lightning.__version__)  # not in bare weights
    return restored(checkpoint, path, trust=weights_only is False)


def read(path: Path, *, weights_only: bool | None = True, mmap: bool = False) -> dict[str, Any]:
    """Reads a checkpoint of any form into host memory.

    Args:
        weights_only: False lets a file run code while it is unpickled: only for trusted files.
        mmap: Map a file's tensors instead of reading them, if the caller copies what it needs.

    Raises:
        UserError: The folder has no known form, the file is not a complete checkpoint, or it holds
            objects that cannot be read without running code.
    """
    try:
        if path.is_dir():
            return read_folder(path, trust=weights_only is False)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return {"state_dict": load_file(path)}
        with enum_members.allowed():
            checkpoint = torch.load(
                path,
                map_location="cpu",
                weights_only=weights_only is not False,
                mmap=mmap and zipfile.is_zipfile(path),
            )
    except (FileNotFoundError, PermissionError, MemoryError, UserError):
        raise
    except Exception as error:  # files of other kinds can raise anything, even a KeyError
        raise UserError(unreadable(path, error)) from error
    return checkpoint if is_training(checkpoint) else {"state_dict": weights_of(checkpoint)}


def unreadable(path: Path, error: Exception) -> Problem:
    """The problem, without torch's advice to let the file run code."""
    objects = re.search(r"GLOBAL (\S+) (was not an allowed global|whose module)", str(error))
    if objects:
        return Problem(
            str(path),
            what=f"holds an object of {objects[1]}, and is read without running code from the file",
            remedy=TRUST,
            code="not-trusted",
        )
    return Problem(
        str(path),
        what=(
            f"is not a checkpoint, or an incomplete one ({type(error).__name__} while it was read)"
        ),
        remedy="name a file that Lightning, torch.save or safetensors wrote",
        code="damaged-file",
    )


def read_folder(path: Path, *, trust: bool) -> dict[str, Any]:
    from distdl.checkpoint import deepspeed_folder, sharded_folder

    if sharded_folder.is_one(path):
        return sharded_folder.read(path, trust=trust)
    if deepspeed_folder.is_one(path):
        return deepspeed_folder.read(path, trust=trust)
    raise UserError.at(
        str(path),
        what="this folder is not a checkpoint that distdl can read",
        remedy="name a file, a run directory, or a folder that FSDP or DeepSpeed wrote",
        code="damaged-file",
    )


def is_training(checkpoint: object) -> bool:
    """Whether this is a checkpoint in Lightning's layout, not bare weights."""
    if not isinstance(checkpoint, Mapping):
        return False
    return isinstance(checkpoint.get("state_dict"), Mapping)


def weights_of(weights: object) -> dict[str, torch.Tensor]:
    """The weights of a file with weights only, also if they are under "model". Raises a UserError
    if it holds something else."""
    for key in ("model", "model_state_dict"):
        if isinstance(weights, Mapping) and isinstance(weights.get(key), Mapping):
            weights = weights[key]
    if not isinstance(weights, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in weights.values()
    ):
        raise UserError.at(
            "",
            what="the file holds neither a Lightning checkpoint nor weights by name",
            code="incomplete",
        )
    return dict(weights)
