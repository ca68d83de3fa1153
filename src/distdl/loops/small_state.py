"""What a validation may change beside the weights: copied before it, put back if it is cut."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from distdl.data.held_generators import HeldGenerators
from distdl.loops.generators import rng_state, set_rng_state

LARGEST = 4096  # elements of a tensor or array that counts as small: more than a batch norm has
LONGEST = 10_000  # entries of a list or dict that does
NUMBERS_AND_TEXT = (bool, int, float, complex, str, bytes, np.generic, type(None))
SEQUENCES, DICTS = (list, tuple, set, deque), (dict, defaultdict, OrderedDict, Counter)
METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
OF_ANY_MODULE = frozenset(vars(nn.Module()))  # torch's own attributes
HASHED_ON = ("cpu", "cuda")  # where torch.hash_tensor runs


class NotSmall(Exception):
    """A value is large, or of a kind that is not copied."""


class SmallState:
    """The small state of a training at one moment.

    Copied are the random generators, small buffers, the optimizers' settings (rates), the last
    metrics, and whether the training shall stop. Also, from the attributes of callbacks, module,
    submodules that are not torch's, data module and schedules: numbers, texts, small tensors,
    generators, and containers of these. Of the weights only a hash is kept.
    """

    def __init__(self, trainer: Trainer, held: HeldGenerators | None = None) -> None:
        self.trainer = trainer
        self.held = held
        self.generators = rng_state(held)
        self.should_stop = trainer.should_stop
        connector = vars(trainer._logger_connector)
        self.metrics = {name: small_copy(connector[name]) for name in METRICS}
        self.values = [(owner, small_values(owner)) for owner in owners(trainer)]
        self.buffers = []
        for module in trainer.lightning_module.modules():
            for name, value in module._buffers.items():
                if value is not None and value.numel() <= LARGEST:
                    self.buffers.append((module._buffers, name, value.detach().clone()))
        self.hashes = hashes(trainer.lightning_module)

    def put_back(self) -> None:
        """Sets everything that was copied."""
        self.trainer.should_stop = self.should_stop
        self.put_back_metrics()
        for owner, values in self.values:
            owner.update(values)
        for owner, name, value in self.buffers:
            owner[name] = value
        set_rng_state(self.generators, self.held)  # also those that are in no attribute

    def put_back_metrics(self) -> None:
        metrics: Any = small_copy(self.metrics)
        vars(self.trainer._logger_connector).update(metrics)

    def changed_weight(self) -> str:
        """The name of a weight that has not the bits that it had; "" if all have."""
        now = hashes(self.trainer.lightning_module)
        for name, before in self.hashes.items():
            # A strategy may leave a weight gathered that was in slices: these cannot be compared.
            same_kind = name in now and now[name][:2] == before[:2]
            if same_kind and not torch.equal(now[name][2], before[2]):
                return name
        return ""


def owners(trainer: Trainer) -> Iterator[dict[str, Any]]:
    """The attributes of the objects whose small state is kept, and the groups of the optimizers."""
    parts: list[Any] = [*trainer.callbacks, trainer.datamodule]  # type: ignore[attr-defined]
    parts += [entry.scheduler for entry in trainer.lr_scheduler_configs]
    modules = trainer.lightning_module.modules()
    parts += [m for m in modules if not type(m).__module__.startswith("torch.")]
    for part in parts:
        if hasattr(part, "__dict__"):
            yield vars(part)
    for optimizer in trainer.optimizers:
        yield from optimizer.param_groups


def small_values(owner: dict[str, Any]) -> dict[str, Any]:
    """Copies of the values that are small, by name."""
    copies = {}
    for name, value in owner.items():
        if name in OF_ANY_MODULE:
            continue
        try:
            copies[name] = small_copy(value)
        except NotSmall:
            continue
    return copies


def small_copy(value: object) -> object:
    """A copy of numbers, texts, small tensors and arrays, generators and containers of these.

    Raises:
        NotSmall: It is anything else, or contains it.
    """
    kind: Any = type(value)
    if isinstance(value, NUMBERS_AND_TEXT):
        return value
    if isinstance(value, nn.Parameter):
        raise NotSmall
    if isinstance(value, Tensor) and value.numel() <= LARGEST:
        return value.detach().clone()
    if isinstance(value, np.ndarray) and value.dtype != object and value.size <= LARGEST:
        return value.copy()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
        return copy.deepcopy(value)
    if isinstance(value, SEQUENCES) and kind in SEQUENCES and len(value) <= LONGEST:
        new = [small_copy(each) for each in value]
        return deque(new, value.maxlen) if isinstance(value, deque) else kind(new)
    if isinstance(value, dict) and kind in DICTS and len(value) <= LONGEST:
        return _filled(copy.copy(value), [(k, small_copy(v)) for k, v in value.items()])
    raise NotSmall


def _filled(container: dict[Any, Any], items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    for key, value in items:
        container[key] = value
    return container


def hashes(module: nn.Module) -> dict[str, tuple[int, torch.dtype, Tensor]]:
    """name -> elements on this rank, type, and a hash of all bits, which stays on the device."""
    found = {}
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        local: Tensor = value.to_local() if hasattr(value, "to_local") else value
        if local.numel() and local.is_floating_point() and local.device.type in HASHED_ON:
            found[name] = (local.numel(), local.dtype, torch.hash_tensor(local).view(torch.int64))
    return found
