"""The input of a benchmark: the run's own loader, or one held batch again and again.

The held batch is on the device, as the data module's hooks returned it. A step on it takes the time
of a step whose input costs nothing, with exactly the shapes and types of the real input.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer

ENDLESS = 10**9  # batches: an epoch never ends in a benchmark


class Input:
    """Switches between real and held input, on every rank at the same step."""

    def __init__(self) -> None:
        self.held = False
        self.loaders: list[EndlessLoader] = []
        self._on_device: Any = None

    def install(self, trainer: Trainer) -> None:
        """Inserts itself between the trainer's strategy and its loaders."""
        strategy: Any = trainer.strategy
        to_device, process = strategy.batch_to_device, strategy.process_dataloader

        def batch_to_device(*args: object, **kwargs: object) -> object:
            if not self.held:
                return to_device(*args, **kwargs)
            if self._on_device is None:
                self._on_device = to_device(*args, **kwargs)
            return self._on_device

        def process_dataloader(loader: object) -> EndlessLoader:
            self.loaders.append(EndlessLoader(process(loader), self))
            return self.loaders[-1]

        strategy.batch_to_device = batch_to_device
        strategy.process_dataloader = process_dataloader
        self._strategy = strategy

    def remove(self) -> None:
        del self._strategy.batch_to_device, self._strategy.process_dataloader
        self._on_device = None
        self.loaders = []

    def prefetched(self) -> int:
        """Batches that worker processes have ready before the first step asks for one."""
        return max((loader.prefetched() for loader in self.loaders), default=0)

    def batches(self) -> int | None:
        """The number of batches in this rank's epoch; None where a loader has no length."""
        try:
            return max((len(loader.loader) for loader in self.loaders), default=None)
        except TypeError:
            return None


class EndlessLoader:
    """A loader that starts again when it ends, within one epoch of Lightning's."""

    def __init__(self, loader: object, switch: Input) -> None:
        self.loader: Any = loader  # the run's own, of any class
        self.switch = switch

    def __len__(self) -> int:
        return ENDLESS

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name in ("loader", "switch"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        for epoch in itertools.count():
            is_empty = True
            for batch in self.loader:
                is_empty = False
                yield batch
                while self.switch.held:
                    yield batch
            if is_empty and epoch:
                raise RuntimeError("the training data gave no batch when it was iterated again")
            if is_empty:
                return

    def prefetched(self) -> int:
        workers = getattr(self.loader, "num_workers", 0) or 0
        return workers * (getattr(self.loader, "prefetch_factor", None) or 2)
