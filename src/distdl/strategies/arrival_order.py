"""The order in which DDP's gradients arrive, kept over a resume.

DDP arranges its buckets anew after the first step, in the order in which the gradients arrived in
it. The arrangement decides in which order the values of three or more ranks are added, and so the
last bits of the sum. A run that resumes would take its first step with the arrangement of a new
run; so the order is saved, and DDP is given it before that step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


class ArrivalOrder:
    """Records the order, as names of parameters, in the next backward through all of them.

    Args:
        module: The module that DDP wraps.
    """

    def __init__(self, module: nn.Module) -> None:
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.names: list[str] = []
        self._missing = {name for name, _ in trained}
        self._handles: list[RemovableHandle] = []
        for name, parameter in trained:
            self._handles.append(self._listen(name, parameter))

    @property
    def complete(self) -> bool:
        return not self._missing

    def _listen(self, name: str, parameter: nn.Parameter) -> RemovableHandle:
        def arrived(_: torch.Tensor) -> None:
            if name in self._missing:
                self._missing.remove(name)
                self.names.append(name)
            if not self._missing:
                self.stop()

        return parameter.register_post_accumulate_grad_hook(arrived)

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def arrange(model: DistributedDataParallel, names: Sequence[str]) -> None:
    """Arranges the buckets of a new `model` as after a step with this order. Collective: zeros are
    reduced once. Does nothing if other parameters are trained."""
    parameters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
    if not _same(parameters, names):
        return
    kept = [parameter.grad for parameter in parameters.values()]
    for parameter in parameters.values():
        parameter.grad = None
    model.reducer.prepare_for_backward([])
    for name in names:
        parameters[name].backward(torch.zeros_like(parameters[name]))
    for parameter, gradient in zip(parameters.values(), kept, strict=True):
        parameter.grad = gradient
    model.reducer._rebuild_buckets()


def _same(parameters: Collection[str], names: Sequence[str]) -> bool:
    return len(parameters) == len(names) and set(parameters) == set(names)
