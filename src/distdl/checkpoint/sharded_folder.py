"""Writes and reads the folder of torch's distributed checkpoint (DCP), with each rank's slices.

torch unpickles the index, `.metadata`, and all values that are not tensors without restriction.
Here the index is read by an unpickler that allows only DCP's own classes, and the rest is read with
weights_only.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from distdl.checkpoint import enum_members
from distdl.runs.checkpoints import remove

INDEX = ".metadata"
REST = "rest.pt"  # the checkpoint without weights and optimizer states
OPTIMIZER = "optimizer_{}"
SHARDED = ("state_dict", "optimizer_states")

OF_METADATA = (
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
)
# Classes that only hold values, and functions that only look up a value.
KNOWN = {
    *(("torch.distributed.checkpoint.metadata", name) for name in OF_METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
}


def is_one(path: Path) -> bool:
    return (path / INDEX).is_file()


def write(checkpoint: Mapping[str, Any], path: Path, *, write_rest: bool) -> None:
    """Writes a folder with the slices of every rank, on a file system that all ranks share. The
    checkpoint is in the portable form, except that tensors may be slices (DTensor). Collective;
    `write_rest` is True on one rank."""
    rest = dict(checkpoint)
    state = {"state_dict": rest.pop("state_dict")}
    for number, optimizer in enumerate(rest.pop("optimizer_states", ())):
        state[OPTIMIZER.format(number)] = optimizer
    if write_rest:  # an interrupted save may have left slices of more ranks
        remove(path)
        path.mkdir(parents=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=path)
    if write_rest:
        torch.save(rest, path / REST)


def read(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Reads a folder as one checkpoint, in host memory. Raises an UnpicklingError if it holds
    objects that cannot be read without `trust`, which lets it run code while it is unpickled."""
    state: dict[str, Any] = {}
    reader = _Reader(path, trust)
    try:
        _load_state_dict(state, storage_reader=reader, planner=_Planner(trust), no_dist=True)
    except CheckpointException as error:  # holds the error of each rank
        raise next(iter(error.failures.values()))[0] from None
    checkpoint = {}
    if (path / REST).is_file():
        with enum_members.allowed():
            checkpoint = torch.load(path / REST, map_location="cpu", weights_only=not trust)
    checkpoint["state_dict"] = state.pop("state_dict", None) or state.pop("model", state)
    optimizers: list[Any] = []
    while OPTIMIZER.format(len(optimizers)) in state:
        optimizers.append(state.pop(OPTIMIZER.format(len(optimizers))))
    if optimizers:
        checkpoint["optimizer_states"] = optimizers
    return checkpoint


class _Index(pickle.Unpickler):
    """Reads DCP's `.metadata`."""

    def find_class(self, module: str, name: str) -> object:
        if f"{module}.{name}" == enum_members.GETATTR:
            return enum_members.member
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in KNOWN or is_type:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name} was not an allowed global")


class _Reader(dcp.FileSystemReader):
    def __init__(self, path: Path, trust: bool) -> None:
        super().__init__(path)
        with (path / INDEX).open("rb") as file:
            index = (pickle.Unpickler if trust else _Index)(file).load()
        if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
            raise pickle.UnpicklingError(f"{INDEX} is not an index that DCP wrote")
        for entry in index.storage_data.values():
            if Path(entry.relative_path).name != entry.relative_path:
                raise pickle.UnpicklingError(f"{INDEX} leads out of the folder")
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        self._index = index

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._index


class _Planner(_EmptyStateDictLoadPlanner):
    def __init__(self, trust: bool) -> None:
        super().__init__()
        self._trust = trust

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Reads values other than tensors, which torch's planner unpickles without restriction."""
        plain = BytesIO()
        with enum_members.allowed():
            torch.save(torch.load(value, weights_only=not self._trust), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
