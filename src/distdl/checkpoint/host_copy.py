"""A snapshot of a checkpoint's values in host memory."""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")
# A tensor on another device is cloned there, and torch.save brings it to the host.
COPIED = ("cpu", "cuda")


class HostCopy:
    """A copy of a checkpoint in host memory; the next copy reuses the memory.

    Each storage is copied once, so tensors that shared one still do, and the file is the same as
    `torch.save` of the original. The memory is kept because new memory costs more than the copy:
    the kernel clears it page by page, and pinning it takes even longer.
    """

    def __init__(self) -> None:
        self._checkpoint: dict[str, Any] | None = None
        # By size in bytes and whether pinned: memory of the current copy, and unused memory.
        self._used: dict[tuple[int, bool], list[torch.UntypedStorage]] = defaultdict(list)
        self._left: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}
        self._storages: dict[tuple[torch.device, int, int], torch.UntypedStorage] = {}
        # By id: (copy, original). Keeping the original alive keeps its id unique.
        self._values: dict[int, tuple[Any, Any]] = {}
        self._events: dict[torch.device, torch.cuda.Event] = {}

    @property
    def held(self) -> bool:
        return self._checkpoint is not None

    @torch.no_grad()
    def take(self, checkpoint: dict[str, Any]) -> None:
        """Copies a checkpoint and forgets the previous one. Copies from a GPU are queued on its
        current stream, before the next step changes anything; only `write` waits for them."""
        self.release()
        self._checkpoint = self._copy(checkpoint)
        for device, event in self._events.items():
            event.record(torch.cuda.current_stream(device))
        self._left = {}  # of sizes that the checkpoint no longer has

    def write(self, path: Path) -> None:
        """Writes the file, in any thread. Raises an OSError if it cannot be written."""
        for event in self._events.values():
            event.synchronize()
        try:
            with path.open("wb") as file:
                torch.save(self._checkpoint, file)
        except RuntimeError as error:
            # On a full disk torch's writer fails twice, and its second error hides the reason.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    def release(self) -> None:
        """Forgets the values and keeps the memory."""
        self._checkpoint = None
        self._storages = {}
        self._values = {}
        self._events = {}
        if self._used:
            self._left = self._used
            self._used = defaultdict(list)

    def _copy(self, value: Value) -> Value:
        if value is None or isinstance(value, str | bytes | int | float):
            return value
        if id(value) in self._values:
            return self._values[id(value)][0]
        new: Any
        if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter) and is_plain(value):
            new = self._tensor(value)
        elif isinstance(value, Tensor):
            new = value.detach().clone().requires_grad_(value.requires_grad)
        elif isinstance(value, tuple | list) and type(value) in (tuple, list):
            new = type(value)(map(self._copy, value))
        elif isinstance(value, dict):
            new = copy.copy(value)  # keeps the class and its attributes
            for key, each in value.items():  # `update` of a Counter would add
                new[key] = self._copy(each)
        else:
            new = copy.deepcopy(value)
        self._values[id(value)] = (new, value)
        return new

    def _tensor(self, tensor: Tensor) -> Tensor:
        host = self._storage(tensor.untyped_storage(), tensor.device)
        new = torch.empty(0, dtype=tensor.dtype).set_(
            host, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=False)
        vars(new).update(self._copy(vars(tensor)))
        return new.requires_grad_(tensor.requires_grad)

    def _storage(self, storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        size = storage.nbytes()
        on_gpu = device.type == "cuda"
        if size == 0:  # all empty storages have address 0
            return torch.UntypedStorage(0)
        key = (device, storage.data_ptr(), size)
        if key not in self._storages:
            left = self._left.get((size, on_gpu))
            host = left.pop() if left else host_memory(size, pinned=on_gpu)
            self._used[size, on_gpu].append(host)
            host.copy_(storage, non_blocking=True)
            self._storages[key] = host
            if on_gpu and device not in self._events:
                self._events[device] = torch.cuda.Event(blocking=True)
        return self._storages[key]


def host_memory(size: int, *, pinned: bool) -> torch.UntypedStorage:
    """`size` bytes. A GPU copies into pinned memory asynchronously, at the full bus rate."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is only a strided view of its storage."""
    more = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and tensor.device.type in COPIED and not more
