"""The next batch comes to the GPU on a stream of its own, while the step before it still runs.

A step only queues its kernels: when the host asks for the next batch, the device is in the middle
of the step before. On the stream of the kernels a copy would wait for their end, and they for the
copy; on another one the two overlap (where the host's memory is pinned). So no batch has to be
prefetched to the device: the order of batches, what a checkpoint counts as consumed, validation,
the last batch and an error in a batch are as they are without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection


class SideStream:
    """Does work on a second stream of a CUDA device and hands the result to the current one.

    Only for work whose input is on the host: it does not wait for the current stream.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[..., Any], *args: Any) -> Any:
        """`work(*args)`; what is queued from now on finds the result complete."""
        step = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            result = work(*args)
        step.wait_stream(self.stream)
        # The allocator knows a tensor by the stream that it was made on: without this its memory
        # could be filled with the batch after the next while the step still reads it.
        apply_to_collection(result, torch.Tensor, lambda x: _used_on(x, step))
        return result


def _used_on(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    if tensor.is_cuda:
        tensor.record_stream(stream)


class Lead:
    """Keeps the host from queueing more than two steps ahead of the device.

    Two are enough to keep it busy. More would pile up batches in its memory (by the hundred, where
    a step is one CUDA graph), and the host would notice a signal that much too early.

    Args:
        device: Nothing is done unless it is a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        # The host sleeps until then: spinning, it would take a core from the loader's workers.
        events = (torch.cuda.Event(blocking=True) for _ in range(2))
        self._ends = list(events) if device.type == "cuda" else []
        self._steps = 0

    def step(self) -> None:
        """At the end of each step: waits for the end of the one before the last."""
        if self._ends:
            end = self._ends[self._steps % 2]
            end.synchronize()  # returns at once where nothing was recorded
            end.record()
            self._steps += 1
