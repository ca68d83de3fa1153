"""The random generators that module, callbacks and data module hold: their states are in each
checkpoint, beside those of the global ones."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset, Sampler

from distdl.data.own_generators import KINDS, Generator, OwnGenerators, reseed
from distdl.util.seeds import stable_seed

log = logging.getLogger(__name__)

States = Mapping[str, Any]  # where a generator is -> its state, in types that `weights_only` loads


class HeldGenerators(OwnGenerators):
    """Those of one training.

    Not those of data sets and loaders, which each sample seeds, or which save their own state.

    Args:
        trainer: Its module, callbacks and data module are searched, also for what they make later.
    """

    left_out = (Dataset, DataLoader, Sampler)

    def __init__(self, trainer: Trainer) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        names = [type(callback).__name__ for callback in callbacks]
        roots = {f"{name}.{names[:n].count(name)}": callbacks[n] for n, name in enumerate(names)}
        data = trainer.datamodule  # type: ignore[attr-defined]
        super().__init__(module=trainer.lightning_module, data=data, **roots)

    def look(self, epoch: int = 0) -> bool:
        is_other = super().look(epoch)
        for path in [path for path, held in self._found.items() if not isinstance(held, KINDS)]:
            del self._found[path]
            self.unknown.append(f"{path} (it has a set_random_state, and tells no state)")
        return is_other

    def name_unrepeatable(self) -> None:
        """Says in one line what no checkpoint can hold."""
        self.look()
        if self.unknown:
            text = "a resume does not repeat what is drawn by %s: keep a generator of torch, NumPy "
            log.info(f"{text}or Python in an attribute", ", ".join(self.unknown))

    def states(self) -> dict[str, Any]:
        """The states of all generators that are there now."""
        self.look()
        return {path: _state(held) for path, held in self._found.items() if isinstance(held, KINDS)}

    def restore(self, states: States) -> None:
        """Sets each to its state, and says in one line which have none."""
        self.look()
        lost = states.keys() - self._found.keys()
        lost |= {
            path for path, held in self._found.items() if not _restored(held, states.get(path))
        }
        if lost:
            text = (
                "what is drawn by %s is not what the run before would have drawn: no state of it "
                "is in the checkpoint, or the generator is not there as the training starts"
            )
            log.warning(text, ", ".join(sorted(lost)))

    def restore_shared(self, states: Sequence[States], seed: int, rank: int) -> None:
        """At another number of ranks: one on which all ranks agreed goes on, others are seeded by
        seed and rank."""
        self.look()
        for path, held in self._found.items():
            first, *others = [each.get(path) for each in states]
            agreed = all(_same(first, other) for other in others)
            if not (agreed and _restored(held, first)):
                reseed(held, stable_seed(seed, rank, path))


def _state(generator: Generator) -> object:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case np.random.Generator():
            return _plain(generator.bit_generator.state)
        case np.random.RandomState():
            return _plain(generator.get_state(legacy=False))
        case random.Random():
            version, internal, gauss = generator.getstate()
            return [version, list(internal), gauss]


def _restored(generator: object, state: object) -> bool:
    """Sets a generator, if this is the state of such a one; whether it is."""
    try:
        match generator:
            case torch.Generator() if isinstance(state, torch.Tensor):
                generator.set_state(state)
            case np.random.Generator() if isinstance(state, dict):
                generator.bit_generator.state = state
            case np.random.RandomState() if isinstance(state, dict):
                generator.set_state(state)
            case random.Random() if isinstance(state, Sequence):
                version, internal, gauss = state
                generator.setstate((version, tuple(internal), gauss))
            case _:
                return False
    except (KeyError, TypeError, ValueError, RuntimeError):
        return False
    return True


def _plain(value: object) -> object:
    """NumPy's arrays and numbers as Python's."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
