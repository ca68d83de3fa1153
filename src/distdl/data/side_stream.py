"""Copies the next batch to the GPU on a separate stream, while the previous step still runs.

A step only queues its kernels: when the host asks for the next batch, the device still runs the
previous step. On the same stream, the copy would wait for that step; on another one both overlap
(if the host's memory is pinned), and no batch needs to be prefetched to the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class SideStream:
    """Runs work on a second stream of a CUDA device, and passes the result to the current stream.
    The work does not wait for the current stream, so its inputs must be on the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """`work(*args)`; kernels queued after this call wait for the result."""
        step = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            result = work(*args)
        step.wait_stream(self.stream)
        # The allocator ties a tensor to the stream that created it. Without this, its memory could
        # be reused for a later batch while the step still reads it.
        apply_to_collection(result, torch.Tensor, lambda x: _used_on(x, step))
        return result


def _used_on(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    if tensor.is_cuda:
        tensor.record_stream(stream)


class QueueLimit:
    """Keeps the host from queueing more than two steps ahead of the device.

    Two steps are enough to keep the device busy. More would pile up batches in its memory (hundreds
    if a step is one CUDA graph), and the host would react to a signal many steps too early. On
    devices other than CUDA's, this class does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        # The host sleeps while waiting: spinning would take a core from the loader's workers.
        events = (torch.cuda.Event(blocking=True) for _ in range(2))
        self._ends = list(events) if device.type == "cuda" else []
        self._steps = 0

    def step(self) -> None:
        """Call at the end of step n: waits until step n - 2 has ended on the device."""
        if self._ends:
            end = self._ends[self._steps % 2]
            end.synchronize()  # returns at once if nothing was recorded
            end.record()
            self._steps += 1
