"""Averages gradients over the replicas of a stage during its backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import Parameter

from distdl.strategies.sharing import buckets


class GradientReducer:
    """Does for the pieces of one stage what DistributedDataParallel does for a complete model.

    During the backward of the last micro-batch, each bucket is all-reduced as soon as its last
    gradient is complete. All replicas use the same order (Li et al. 2020, "PyTorch Distributed",
    arXiv 2006.15704, section 3.2.3).

    Args:
        pieces: The parameters of each piece of this stage, in the model's order.
        group: The replicas.
        micro_batches: Backward passes per step.
        bucket_mb: Size of a bucket in MiB.
    """

    def __init__(
        self,
        pieces: Sequence[Iterable[Parameter]],
        group: dist.ProcessGroup,
        micro_batches: int,
        bucket_mb: float,
    ) -> None:
        self.group = group
        self.replicas = dist.get_world_size(group)
        self.micro_batches = micro_batches
        self.pieces = [[p for p in piece if p.requires_grad] for piece in pieces]
        # Backward completes the last block of the last piece first.
        order = [p for piece in reversed(self.pieces) for p in reversed(piece)]
        self.buckets = list(buckets(order, bucket_mb * 2**20))
        self.active = False
        self._handles = [p.register_post_accumulate_grad_hook(self._accumulated) for p in order]

    def begin(self, reduce: bool) -> None:
        """Call before a batch; `reduce`: whether the optimizer steps after it."""
        self.active = reduce and self.replicas > 1
        self._counts = {p: 0 for bucket in self.buckets for p in bucket}
        self._ready: set[Parameter] = set()
        self.launched: list[tuple[list[Parameter], torch.Tensor, dist.Work | None]] = []

    def _accumulated(self, parameter: Parameter) -> None:
        if self.active:
            self._counts[parameter] += 1
            if self._counts[parameter] == self.micro_batches:
                self._ready.add(parameter)
                self._launch()

    def piece_done(self, piece: int) -> None:
        """Marks a piece's gradients as complete: zero bubble does not run autograd's hooks."""
        if self.active:
            self._ready.update(self.pieces[piece])
            self._launch()

    def _launch(self) -> None:
        while len(self.launched) < len(self.buckets):
            bucket = self.buckets[len(self.launched)]
            if not self._ready.issuperset(bucket):
                return
            for p in bucket:
                if p.grad is None:  # unused in this step; another replica may have used it
                    p.grad = torch.zeros_like(p)
            gradients = [p.grad for p in bucket if p.grad is not None]
            flat = _flatten_dense_tensors(gradients).div_(self.replicas)
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self.launched.append((bucket, flat, work))

    def finish(self) -> None:
        """Waits for the all-reduces and replaces the gradients by their averages."""
        if not self.active:
            return
        for piece in range(len(self.pieces)):
            self.piece_done(piece)
        for bucket, flat, work in self.launched:
            if work is not None:
                work.wait()
            gradients = [p.grad for p in bucket if p.grad is not None]
            means = _unflatten_dense_tensors(flat, gradients)
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean)
        self.active = False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
