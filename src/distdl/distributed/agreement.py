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
        remedy = f"shard evenly, or trainer.limit_train_batches={min(seen):g}"
        raise UserError.at(
            "data",
            f"{what} {other}: the ranks would wait for each other",
            remedy,
            code="unsupported",
        )


class Agreement:
    """Flags that any rank may raise, seen by all ranks at the same step.

    A MAX all-reduce of a few bytes on gloo is started at one step and read at the next, so no step
    waits for the network. All ranks must call `exchange` equally often.
    """

    def __init__(self, size: int) -> None:
        self._flags = torch.zeros(size, dtype=torch.int64)
        self._work: dist.Work | None = None
        self._withdrawn: set[int] = set()
        self._alone = process_group.world_size() == 1

    def exchange(self, *flags: bool) -> list[bool]:
        """Raises our flags and returns those that the ranks raised at the previous call."""
        if self._alone:
            return list(flags)
        agreed = self._read()
        self._flags = torch.tensor([int(flag) for flag in flags])
        self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, async_op=True)
        return agreed

    def now(self, *flags: bool) -> list[bool]:
        """Like `exchange` but without the lag, for rare moments; it waits for the slowest rank."""
        before = self.exchange(*flags)
        if self._alone:
            return before
        return [a or b for a, b in zip(before, self._read(), strict=True)]

    def withdraw(self, number: int) -> None:
        """Drops a flag that is being exchanged: its request has just been fulfilled.

        All ranks must call this between the same two exchanges.
        """
        self._withdrawn.add(number)

    def _read(self) -> list[bool]:
        if self._work is not None:
            self._work.wait()
            self._work = None
        flags = enumerate(self._flags.tolist())
        agreed = [bool(flag) and number not in self._withdrawn for number, flag in flags]
        self._flags = torch.zeros_like(self._flags)
        self._withdrawn.clear()
        return agreed
