"""Large results of all ranks, brought to rank 0 in memory that does not grow with them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from distdl.distributed import process_group

ROOM = 64 << 20  # bytes that rank 0 holds of one piece of all ranks
LEAST = 64 << 10  # bytes of a piece


def gather_to_first(data: bytes, room: int = ROOM) -> Iterator[bytes]:
    """The bytes of every rank, on rank 0 in rank order; the others get nothing. All ranks call this
    and exhaust the iterator.

    Bytes travel on the host in pieces of equal size, a piece of every rank at a time. So rank 0
    holds `room` bytes besides what it has been given already, and another rank its own piece.
    """
    world_size = process_group.world_size()
    if world_size == 1:
        yield data
        return
    sizes = process_group.gather(len(data))
    piece = max(LEAST, room // world_size)
    first = dist.get_rank() == 0
    parts = [bytearray() for _ in range(world_size if first else 0)]
    for start in range(0, max(sizes), piece):
        length = min(piece, max(sizes) - start)
        mine = torch.zeros(length, dtype=torch.uint8)
        part = data[start : start + length]
        if part:
            mine[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        into = [torch.empty_like(mine) for _ in parts]
        dist.gather(mine, into if first else None, dst=0)
        for rank, tensor in enumerate(into):
            parts[rank] += tensor.numpy().tobytes()[: max(0, sizes[rank] - start)]
    for rank, whole in enumerate(parts):
        parts[rank] = bytearray()
        yield bytes(whole)
