"""Reading checkpoints in whatever form they are, as one portable dict (see `distdl.portable`).

- a file: Lightning's layout, or bare weights (`.pth` of torchvision and timm, `.safetensors`);
- a folder of torch's distributed checkpoint, which `checkpoint.sharded=true` writes under FSDP;
- a folder of DeepSpeed's.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import TorchCheckpointIO

from distdl.checkpoint import remove
from distdl.errors import Problem, UserError

REST = "rest.pt"  # what of a sharded checkpoint is no weight and no optimizer state
OPTIMIZER = "optimizer_{}"
SHARDED = ("state_dict", "optimizer_states")


class AnyCheckpoint(TorchCheckpointIO):
    """Writes files as Lightning does, and reads every form.

    While `taker` is set, it is asked first, and what it takes is not written (`distdl.saving`).
    """

    taker: Callable[[dict[str, Any]], bool] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if self.taker is None or not self.taker(checkpoint):
            super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read(Path(path), weights_only=weights_only)


def read(path: Path, *, weights_only: bool | None = True, mmap: bool = False) -> dict[str, Any]:
    """A checkpoint of any form, in host memory.

    Args:
        path: A file or a folder.
        weights_only: False lets a file run code while it is unpickled; only for files of one's own.
        mmap: Map a file's tensors instead of reading them: for who copies what it needs.

    Raises:
        UserError: The folder is none of a known form, or the file is no whole checkpoint.
    """
    if path.is_dir():
        return read_folder(path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return {"state_dict": load_file(path)}
        found = torch.load(
            path,
            map_location="cpu",
            weights_only=weights_only is not False,
            mmap=mmap and zipfile.is_zipfile(path),
        )
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:  # of a file of another kind anything is raised: a KeyError, too
        raise UserError(unreadable(path, error)) from error
    return found if is_training(found) else {"state_dict": weights_of(found)}


def unreadable(path: Path, error: Exception) -> Problem:
    """Without torch's own advice, which is to let the file run code."""
    objects = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
    if objects:
        what = f"holds an object of {objects[1]}, and is read without running code of its own"
        return Problem(str(path), what, "write it again with tensors, numbers and strings alone")
    what = f"is no checkpoint, or not all of one ({type(error).__name__} while it was read)"
    return Problem(str(path), what, "name a file that Lightning, torch.save or safetensors wrote")


def read_folder(path: Path) -> dict[str, Any]:
    if (path / ".metadata").is_file():
        return read_sharded(path)
    from distdl import deepspeed_folder

    if deepspeed_folder.is_one(path):
        return deepspeed_folder.read(path)
    raise UserError(
        Problem(
            str(path),
            "this folder is no checkpoint that distdl can read",
            "name a file, a run directory, or a folder that FSDP (torch's distributed checkpoint) "
            "or DeepSpeed wrote",
        )
    )


def is_training(found: Any) -> bool:
    """Whether this is a checkpoint in Lightning's layout, and not bare weights."""
    return isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping)


def weights_of(found: Any) -> dict[str, torch.Tensor]:
    """The weights of a file that holds nothing else; some put them below "model".

    Raises:
        UserError: It holds something else.
    """
    for key in ("model", "model_state_dict"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(
        isinstance(v, torch.Tensor) for v in found.values()
    ):
        raise UserError("the file holds neither a checkpoint of Lightning's nor weights by name")
    return dict(found)


def write_sharded(checkpoint: Mapping[str, Any], path: Path, *, write_rest: bool) -> None:
    """Writes a folder into which every rank puts its slices. Collective.

    Args:
        checkpoint: Portable, except that tensors may be slices (DTensor).
        path: The folder; every rank must reach it.
        write_rest: True on one rank.
    """
    rest = dict(checkpoint)
    state = {"state_dict": rest.pop("state_dict")}
    for number, optimizer in enumerate(rest.pop("optimizer_states", ())):
        state[OPTIMIZER.format(number)] = optimizer
    if write_rest:  # slices of more ranks may lie there, from a save that was cut off
        remove(path)
        path.mkdir(parents=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=path)
    if write_rest:
        torch.save(rest, path / REST)


def read_sharded(path: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    # As torch's own format_utils.dcp_to_torch_save, which writes a file.
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    rest = path / REST
    found = torch.load(rest, map_location="cpu", weights_only=True) if rest.is_file() else {}
    found["state_dict"] = state.pop("state_dict", None) or state.pop("model", state)
    optimizers: list[Any] = []
    while OPTIMIZER.format(len(optimizers)) in state:
        optimizers.append(state.pop(OPTIMIZER.format(len(optimizers))))
    if optimizers:
        found["optimizer_states"] = optimizers
    return found
