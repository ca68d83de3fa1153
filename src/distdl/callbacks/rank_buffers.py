"""Buffers that differ between the ranks of DDP (batch norm's statistics), in a checkpoint.

A checkpoint's weights have those of rank 0. DDP gives them to every rank before the next batch of
training or validation, unless the module steps by itself (Lightning turns it off), the batch before
was one of a validation, or `broadcast_buffers` is false. A moving average of the weights has them
when a validation has exchanged it. Other strategies agree on buffers before they save.

A new DDP gives them before its first batch in any case. A resumed run leaves that out where the run
that was saved would not have done it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from distdl.distributed import process_group

KEY = "rank_buffers"


def will_be_given(trainer: Trainer) -> bool:
    """Whether every rank has rank 0's buffers in the next batch, or at this moment already."""
    model = trainer.strategy.model
    return not isinstance(model, DistributedDataParallel) or model.will_sync_module_buffers()


def of_ranks(trainer: Trainer, broadcasts: bool) -> dict[str, Any]:
    """The buffers that are needed and are not those of rank 0, of each rank, by name; empty if
    there are none. Collective; the others' are on rank 0 alone, which writes the checkpoint.

    Args:
        broadcasts: See `will_be_given`.
    """
    if broadcasts:
        return {}
    mine = dict(_buffers(trainer))
    hashes = process_group.gather({name: _hash(buffer) for name, buffer in mine.items()})
    if all(each == hashes[0] for each in hashes):
        return {}
    rank = trainer.global_rank
    differing = {n: mine[n].cpu() for n, h in hashes[rank].items() if h != hashes[0].get(n)}
    of_all: list[Any] | None = [None] * len(hashes) if rank == 0 else None
    dist.gather_object(differing, of_all)
    return {"of_ranks": of_all}


def restore(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Gives this rank its own buffers, if there are as many ranks as before."""
    own = saved.get(KEY)
    model = trainer.strategy.model
    if not own or len(own["of_ranks"]) != process_group.world_size():
        return
    mine = own["of_ranks"][trainer.global_rank]
    for name, buffer in _buffers(trainer):
        if name in mine:
            buffer.copy_(mine[name])
    if isinstance(model, DistributedDataParallel):
        model.require_forward_param_sync = False


def _buffers(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in trainer.lightning_module.named_buffers():
        yield f"module.{name}", buffer
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        average = getattr(callback, "_average_model", None)  # Lightning's weight averaging
        if isinstance(average, torch.nn.Module):
            for name, buffer in average.named_buffers():
                yield f"{callback.state_key}.{name}", buffer


def _hash(buffer: Tensor) -> str:
    content = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.tobytes()).hexdigest()
