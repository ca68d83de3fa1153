"""Decisions that all ranks take together at a step boundary: stop, or write a checkpoint now."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from distdl.distributed import process_group
from distdl.util.errors import UserError


def least_of_all(batches: float) -> float:
    """The least number of batches (infinity: unknown) of any rank. All ranks call this; with
    several, the result is 0 if a rank does not know its number."""
    counts = process_group.gather(batches)
    return 0 if math.isinf(max(counts)) and len(counts) > 1 else min(counts)


def refuse_uneven(batches: float) -> None:
    """Ends a training whose ranks have different numbers of batches (infinity: unknown): some ranks
    would wait for the gradients of others. All ranks call this.

    Raises:
        UserError: On all ranks.
    """
    seen = process_group.gather(batches)
    other = next((rank for rank, count in enumerate(seen) if count != seen[0]), None)
    if other is not None and not math.isinf(max(seen)):
        what = f"train_dataloader gives {seen[0]:g} batches on rank 0 and {seen[other]:g} on rank"
        raise UserError.at(
            "data",
            what=f"{what} {other}: the ranks would wait for each other",
            remedy=f"shard evenly, or trainer.limit_train_batches={min(seen):g}",
            code="unsupported",
        )


class Agreement:
    """Numbers that any rank may raise, seen by all ranks at the same step: flags, of which 1 is up,
    and what one rank knows, where the others give 0.

    A MAX all-reduce of a few bytes on gloo is started at one step and read at the next, so no step
    waits for the network. All ranks must call `exchange` equally often.
    """

    def __init__(self, size: int) -> None:
        self._numbers = torch.zeros(size, dtype=torch.int64)
        self._work: dist.Work | None = None
        self._withdrawn: set[int] = set()
        self._alone = process_group.world_size() == 1

    def exchange(self, *numbers: int) -> list[int]:
        """Gives our numbers and returns the largest that the ranks gave at the previous call."""
        if self._alone:
            return list(numbers)
        agreed = self._read()
        self._numbers = torch.tensor([int(number) for number in numbers])
        self._work = dist.all_reduce(self._numbers, op=dist.ReduceOp.MAX, async_op=True)
        return agreed

    def now(self, *numbers: int) -> list[int]:
        """Like `exchange` but without the lag, for rare moments; it waits for the slowest rank."""
        before = self.exchange(*numbers)
        if self._alone:
            return before
        return [*map(max, before, self._read())]

    def withdraw(self, index: int) -> None:
        """Drops a flag that is being exchanged: its request has just been fulfilled.

        All ranks must call this between the same two exchanges.
        """
        self._withdrawn.add(index)

    def _read(self) -> list[int]:
        if self._work is not None:
            self._work.wait()
            self._work = None
        numbers: list[int] = self._numbers.tolist()
        agreed = [0 if i in self._withdrawn else number for i, number in enumerate(numbers)]
        self._numbers = torch.zeros_like(self._numbers)
        self._withdrawn.clear()
        return agreed
