"""Part 4 of a domain: what a validation measures, exact at any number of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

# As it arrives at a module: what the domain's collate made, on the device; or what a data module of
# the user's gives, such as a pair of images and labels.
Batch = TypeVar("Batch")
# Of the network for a batch, such as logits [B, num_classes].
Outputs = TypeVar("Outputs")
# Sums a tensor over the ranks, and gives all of them the sum: the strategy's own.
Reduce = Callable[[torch.Tensor], torch.Tensor]


def sum_over(strategy: Strategy) -> Reduce:
    """The sum by a strategy of Lightning's."""

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        total = strategy.reduce(tensor, reduce_op="sum")
        assert isinstance(total, torch.Tensor)
        return total

    return reduce


class Metric(ABC, Generic[Batch, Outputs]):
    """The numbers of one validation or test. The module (`distdl.models.evaluated`) calls `start`,
    then `add` for each batch, then `result`.

    Every sample counts once: a batch's "weight", float32 [B], is 0 for rows that only make the
    shapes of all ranks equal, and for damaged images that were replaced.
    """

    @abstractmethod
    def start(self, device: torch.device) -> None:
        """Forgets all samples. Sums belong on `device`, where nobody waits for them."""

    @abstractmethod
    def add(self, batch: Batch, outputs: Outputs) -> None:
        """Adds the samples of a batch, and what the network gave for them."""

    @abstractmethod
    def result(self, reduce: Reduce) -> dict[str, float]:
        """The values over all ranks, the same on every rank: a value that is no mean over samples
        gathers what it needs (`distdl.distributed.process_group.gather`). Collective.

        Returns:
            By name, without the stage: "acc1" becomes "val/acc1". "samples" is how many counted.
        """
