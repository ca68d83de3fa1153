"""The last weights of two runs, compared bit by bit."""

from __future__ import annotations

import math
from pathlib import Path

from distdl.runs.checkpoints import CheckpointStore


def largest_difference(run: Path, twin: Path) -> float:
    """0.0 if all bits are equal; infinity for other tensors, and values that are not finite."""
    import torch

    from distdl.checkpoint import formats

    paths = [CheckpointStore(each / "checkpoints").newest() for each in (run, twin)]
    one, other = (formats.load(path)["state_dict"] if path else {} for path in paths)
    kinds = [{k: (v.shape, v.dtype) for k, v in each.items()} for each in (one, other)]
    if not one or kinds[0] != kinds[1]:
        return math.inf
    largest = 0.0
    for name, values in one.items():
        first = values.flatten().contiguous()
        second = other[name].flatten().contiguous()
        if not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
            gap = float((first.double() - second.double()).abs().max())
            largest = max(largest, gap if math.isfinite(gap) else math.inf)
    return largest
