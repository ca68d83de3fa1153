"""Provides the checkpoint to resume from on every node, also without a shared file system."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from distdl.distributed import process_group
from distdl.ranks.environment import Environment
from distdl.runs.checkpoints import manifest_of
from distdl.runs.directory import write_text
from distdl.util.atomic_files import atomic_file
from distdl.util.errors import UserError

log = logging.getLogger(__name__)

CHUNK = 64 * 2**20  # bytes per broadcast


def provide(chosen: str | None, store: Path, environment: Environment) -> str | None:
    """Sends rank 0's checkpoint over the process group to nodes that lack it. Collective.

    The manifest holds the hash and so distinguishes checkpoints of the same name.

    Args:
        chosen: Rank 0's choice; the value on other ranks is ignored.
        store: The run's directory on this rank; mounts may differ between nodes.

    Returns:
        The checkpoint's path on this rank, or None.
    """
    if environment.rank == 0 and chosen is not None and Path(chosen).is_relative_to(store):
        chosen = str(Path(chosen).relative_to(store))
    chosen = process_group.broadcast(chosen)
    if chosen is None:
        return None
    path = store / chosen  # a path outside the store is absolute and stays so
    if environment.world_size == 1:
        return str(path)
    manifest = manifest_of(path)
    text = manifest.read_text() if environment.rank == 0 and manifest.exists() else ""
    text = process_group.broadcast(text)
    local = manifest.read_text() if manifest.exists() else ""
    lacks = environment.local_rank == 0 and not (path.exists() and local == text)
    lacking = [rank for rank, lack in enumerate(process_group.gather(lacks)) if lack]
    if not lacking:
        return str(path)
    if process_group.broadcast(path.is_dir()):
        raise UserError.at(
            str(path),
            what=f"is a sharded checkpoint, and ranks {lacking} do not see its folder",
            remedy="convert it to a file, which every node then receives: python -m distdl convert",
            code="unreadable",
        )
    if environment.rank == 0:
        log.info("the nodes share no file system: %s is sent to ranks %s", path.name, lacking)
    size = process_group.broadcast(path.stat().st_size if environment.rank == 0 else 0)
    with (
        path.open("rb") if environment.rank == 0 else nullcontext() as source,
        atomic_file(path) if lacks else nullcontext() as target,
    ):
        for start in range(0, size, CHUNK):
            chunk = torch.empty(min(CHUNK, size - start), dtype=torch.uint8)
            if source is not None:
                source.readinto(chunk.numpy().data)
            dist.broadcast(chunk, src=0)  # a CPU tensor, so by gloo
            if target is not None:
                target.write(chunk.numpy().tobytes())
    if lacks and text:  # the manifest marks the copy as intact
        write_text(manifest, text, durable=True)
    dist.barrier()
    return str(path)
