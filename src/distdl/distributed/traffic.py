"""Bytes that a rank sends, counted where collectives are called: at torch's dispatcher.

All collectives pass through it: `torch.distributed`'s functions, DDP's reducer (in C++), FSDP,
functional collectives, the pipeline's sends. Counting costs Python time on every operation of the
model, so count a few steps and do not time them. There are two numbers:

- `payload`: the bytes that the rank passes to the collective, such as all gradients in an
  all-reduce,
- `sent`: the bytes that then leave the rank with the ring algorithm, which sends the fewest
  (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
  section 3). A broadcast, reduce, gather or scatter is counted as the mean over its ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

P = ParamSpec("P")
Result = TypeVar("Result")

# The argument with this rank's contribution, the share of this that leaves each of n ranks, and
# the operations of torch.distributed (or its _functional_collectives) for which both hold.
# Operations not listed (recv_, barrier, wait_tensor) send nothing.
_SHARES: list[tuple[int, Callable[[int], float], str]] = [
    (0, lambda n: 2 * (n - 1) / n, "allreduce allreduce_coalesced all_reduce all_reduce_coalesced"),
    (0, lambda n: (n - 1) / n, "broadcast reduce scatter"),
    (0, lambda n: (n - 1) / n, "reduce_scatter_tensor reduce_scatter_tensor_out all_to_all_single"),
    (1, lambda n: n - 1, "allgather _allgather_base allgather_coalesced"),
    (1, lambda n: n - 1, "allgather_into_tensor_coalesced"),
    (0, lambda n: n - 1, "all_gather_into_tensor all_gather_into_tensor_out"),
    (0, lambda n: n - 1, "all_gather_into_tensor_coalesced"),
    (1, lambda n: (n - 1) / n, "reduce_scatter _reduce_scatter_base alltoall alltoall_base"),
    (1, lambda n: (n - 1) / n, "reduce_scatter_tensor_coalesced gather gather_into_tensor"),
    (0, lambda n: 1, "send isend"),
]
_RULES = {name: (at, share) for at, share, names in _SHARES for name in names.split()}
# Communication hooks call these from the backend's threads, where our mode is not active.
_CALLED_IN_OTHER_THREADS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


@dataclass
class Tally:
    """Calls and bytes of one kind of collective; the module defines the bytes."""

    calls: int = 0
    payload: int = 0
    sent: float = 0.0


@dataclass
class Traffic:
    """A counter. `with traffic.counted(): step()` adds what the step sends; repeatable."""

    collectives: dict[str, Tally] = field(default_factory=dict)

    @property
    def payload(self) -> int:
        return sum(tally.payload for tally in self.collectives.values())

    @property
    def sent(self) -> float:
        return sum(tally.sent for tally in self.collectives.values())

    @contextmanager
    def counted(self) -> Iterator[Traffic]:
        with ExitStack() as stack:
            for name in _CALLED_IN_OTHER_THREADS:
                original = getattr(dist, name)
                setattr(dist, name, self._in_any_thread(original))
                stack.callback(setattr, dist, name, original)
            stack.enter_context(_Mode(self))
            yield self

    def _in_any_thread(self, original: Callable[P, Result]) -> Callable[P, Result]:
        @functools.wraps(original)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            if any(isinstance(mode, _Mode) for mode in _get_current_dispatch_mode_stack()):
                return original(*args, **kwargs)
            with _Mode(self):
                return original(*args, **kwargs)

        return call

    def add(self, operation: str, tensors: Sequence[object], ranks: int) -> None:
        name = operation.rstrip("_")
        if name not in _RULES or ranks == 1:
            return
        argument, share = _RULES[name]
        leaves = [t for t in tree_leaves(tensors[argument]) if isinstance(t, torch.Tensor)]
        size = sum(t.numel() * t.element_size() for t in leaves)
        tally = self.collectives.setdefault(name, Tally())
        tally.calls += 1
        tally.payload += size
        tally.sent += size * share(ranks)


class _Mode(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            self.traffic.add(name, args, _ranks(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _ranks(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of ranks that take part."""
    names = (argument.name for argument in func._schema.arguments)
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    if "process_group" in values:
        return dist.ProcessGroup.unbox(values["process_group"]).size()
    group: Any = values.get("group_name")
    if isinstance(group, str):
        return _resolve_process_group(group).size()  # type: ignore[arg-type]
    return group.size() if isinstance(group, dist.ProcessGroup) else dist.get_world_size()


def in_words(size: float) -> str:
    """Bytes as text: 102.2 MB (10^6, the usual unit for links)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:,.0f} B"
