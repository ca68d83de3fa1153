"""Counts the bytes of tensors, real or fake: of those in a tree, and of those that are alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


def tensors_in(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each counted once."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


class LiveBytes(TorchDispatchMode):
    """Bytes of the live tensors that were created while this mode was active, real or fake; and the
    floating-point operations meanwhile, by torch's formulas. torch's FlopCounterMode would keep
    tensors alive that a second forward makes in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self.now = self.most = self.gradients = self.most_beside_gradients = 0
        self.most_of_block = 0  # beside gradients, since this was set
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        output = func(*args, **(kwargs or {}))
        self.add(output)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=output)
        return output

    def add(self, tree: object) -> None:
        for tensor in tensors_in(tree):
            storage = tensor.untyped_storage()
            key = storage._cdata
            size = storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, key, size)
                beside = self.now - self.gradients
                self.most_beside_gradients = max(self.most_beside_gradients, beside)
                self.most_of_block = max(self.most_of_block, beside)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Excludes tensors that existed before this mode was active."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def count_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.gradients += parameter.grad.untyped_storage().nbytes()

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
