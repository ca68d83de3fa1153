"""Loads batches in threads of the rank's own process, in place of processes.

While a thread decodes, it does not hold the interpreter's lock, so threads load as fast as
processes, and pass on what they have made as it is. Each batch is made by one thread. That needs
data that draw nothing from the process's generators: `KeyedDataset.assembles`.
"""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from distdl.data.encoded import EncodedData, Room
from distdl.data.keyed import KeyedDataset
from distdl.data.sampling import SampleKey

AHEAD = 2  # batches for each thread, as torch's prefetch_factor


class ThreadLoader(DataLoader[Any]):
    """A DataLoader whose workers are threads, once it loads a `KeyedDataset` that assembles its
    batches; until then, and for any other data set, it is torch's."""

    threads: _Threads | None = None

    def __iter__(self) -> Any:  # noqa: ANN401, torch's own iterator has a private class
        dataset = self.dataset
        if not (isinstance(dataset, KeyedDataset) and dataset.assembles and self.num_workers):
            return super().__iter__()
        if self.threads is None:
            # As torch does for its processes: what the training draws next is the same with both.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self.threads = _Threads(dataset, self.num_workers, self.pin_memory)
        batches: Any = self.batch_sampler  # of keys, since the data set is keyed
        return _Batches(self.threads, iter(batches), AHEAD * self.num_workers)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "threads": None}


@dataclass
class _Order:
    """One batch to make, and what became of it."""

    keys: list[SampleKey]
    wanted: threading.Event  # cleared when the epoch is given up
    done: threading.Event = field(default_factory=threading.Event)
    batch: dict[str, Any] | None = None
    error: BaseException | None = None


class Lent:
    """Memory for batches, which is used again once nothing refers to a batch any more.

    Threads that each asked malloc for it would make the process grow with every epoch, since malloc
    divides its memory among threads. Pinned memory needs no such thing: torch uses it again, once
    the GPU has copied it.
    """

    def __init__(self) -> None:
        self._size = 0
        self._free: list[np.ndarray] = []

    def __call__(self, shape: Sequence[int]) -> torch.Tensor:
        size = math.prod(shape)
        if size != self._size:  # other images come, and those of before may never come again
            self._size = size
            self._free = []
        free = self._free
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(size, np.uint8)
        view = memory.reshape(*shape)  # the tensors of this batch hold it
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.from_numpy(view)


def _pinned_room(shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.uint8, pin_memory=True)


class _Threads:
    """Threads that make batches, until this object is gone. They end with the process, whatever
    they do."""

    def __init__(self, dataset: KeyedDataset, count: int, pin: bool) -> None:
        self.orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        device = torch.cuda.current_device() if pin and torch.cuda.is_available() else None
        room = Lent() if device is None else _pinned_room
        for number in range(count):
            mine = dataset.dataset.for_thread(count)
            work = (self.orders, mine, dataset.seed, device, room)
            name = f"loader-{number}"
            threading.Thread(target=_work, args=work, name=name, daemon=True).start()
        weakref.finalize(self, _end, self.orders, count)


def _end(orders: queue.SimpleQueue[_Order | None], count: int) -> None:
    for _ in range(count):
        orders.put(None)


def _work(
    orders: queue.SimpleQueue[_Order | None],
    dataset: EncodedData,
    seed: int,
    device: int | None,
    room: Room,
) -> None:
    if device is not None:  # a thread begins with device 0, and would make a context there
        torch.cuda.set_device(device)
    while (order := orders.get()) is not None:
        if order.wanted.is_set():
            try:
                batch = dataset.assembled(order.keys, seed, room).batch
                order.batch = batch if device is None else _pinned(batch)
                del batch  # the rank alone refers to it
            except BaseException as error:  # the rank raises it
                order.error = error
        order.done.set()
        del order


def _pinned(batch: dict[str, Any]) -> dict[str, Any]:
    """Also its small tensors; those of images are pinned already."""
    return {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


class _Batches(Iterator[dict[str, Any]]):
    """The batches of an epoch, in order."""

    def __init__(self, threads: _Threads, keys: Iterator[list[SampleKey]], ahead: int) -> None:
        self._threads = threads
        self._keys = keys
        self._wanted = threading.Event()
        self._wanted.set()
        self._ordered: deque[_Order] = deque()
        for _ in range(ahead):
            self._order()

    def _order(self) -> None:
        keys = next(self._keys, None)
        if keys is not None:
            order = _Order(keys, self._wanted)
            self._ordered.append(order)
            self._threads.orders.put(order)

    def __next__(self) -> dict[str, Any]:
        if not self._ordered:
            raise StopIteration
        order = self._ordered.popleft()
        order.done.wait()
        self._order()
        if order.error is not None:
            raise order.error
        assert order.batch is not None
        return order.batch

    def __del__(self) -> None:
        self._wanted.clear()
