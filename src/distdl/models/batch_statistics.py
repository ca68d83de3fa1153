"""The statistics of batch norms, computed again for weights that no batch was trained with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from distdl.distributed import process_group

Statistics = dict[str, tuple[Tensor, Tensor]]  # name of a norm -> mean and variance, [channels]


class Measuring:
    """Measures the inputs of norms, over the batches of all ranks: the same at any number of ranks.

    Each batch is normalised by its own mean and variance, as in training, but by those of the
    global batch. What a norm has measured is the mean over its batches, of the variance the
    unbiased one (Ioffe and Szegedy 2015, algorithm 2).

    Args:
        norms: By name.
    """

    def __init__(self, norms: Mapping[str, _BatchNorm]) -> None:
        self.norms = norms
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._batches: dict[str, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, each forward of a norm is measured. Its own statistics are lost. Collective: all
        ranks call each norm as often."""
        modes = {name: norm.training for name, norm in self.norms.items()}
        hooks = [
            norm.register_forward_pre_hook(_Look(self, name)) for name, norm in self.norms.items()
        ]
        try:
            for norm in self.norms.values():
                norm.eval()  # it takes the statistics that it has: those that `_Look` sets
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for name, norm in self.norms.items():
                norm.train(modes[name])

    def add(self, name: str, inputs: Tensor) -> None:
        mean, variance, count = over_all_ranks(inputs)
        norm = self.norms[name]
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
        before = self._sums.get(name, (torch.zeros_like(mean), torch.zeros_like(mean)))
        unbiased = variance * count / (count - 1).clamp(min=1)
        self._sums[name] = (before[0] + mean, before[1] + unbiased)
        self._batches[name] = self._batches.get(name, 0) + 1

    def result(self) -> Statistics:
        """What was measured; a norm that was not called is missing."""
        return {
            name: (mean / self._batches[name], variance / self._batches[name])
            for name, (mean, variance) in self._sums.items()
        }


class _Look:
    """A hook before the forward of one norm."""

    def __init__(self, measuring: Measuring, name: str) -> None:
        self.measuring = measuring
        self.name = name

    def __call__(self, norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.measuring.add(self.name, args[0])


def over_all_ranks(inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of values per channel. Collective.

    Args:
        inputs: Of this rank, [N, C, ...]; N may be 0.
    """
    dims = [dim for dim in range(inputs.dim()) if dim != 1]
    rows = inputs.numel() // inputs.shape[1]
    if rows:
        variance, mean = torch.var_mean(inputs.float(), dims, correction=0)
    else:
        mean = variance = inputs.new_zeros(inputs.shape[1], dtype=torch.float32)
    mine = torch.stack((torch.full_like(mean, rows), mean, variance))
    parts = [mine]
    if process_group.world_size() > 1:
        parts = [torch.empty_like(mine) for _ in range(process_group.world_size())]
        dist.all_gather(parts, mine)
    counts, means, variances = torch.stack(parts, dim=1)
    count = counts.sum(0)
    whole = (counts * means).sum(0) / count.clamp(min=1)
    within = counts * (variances + (means - whole) ** 2)
    return whole, within.sum(0) / count.clamp(min=1), count


def set_statistics(norms: Mapping[str, _BatchNorm], statistics: Statistics) -> None:
    """Sets the running statistics, in place: DistributedDataParallel holds these tensors."""
    for name, (mean, variance) in statistics.items():
        norm = norms[name]
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)


def statistics_of(norms: Mapping[str, _BatchNorm]) -> Statistics:
    """Copies of the running statistics."""
    found: Statistics = {}
    for name, norm in norms.items():
        assert norm.running_mean is not None
        assert norm.running_var is not None
        found[name] = (norm.running_mean.clone(), norm.running_var.clone())
    return found
