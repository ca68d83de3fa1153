"""What random choices are drawn from: the process's generators, or a counter of the sample's own.

The name of the kind is `data.draws`, which a run keeps: a run that was started with one draws the
same choices after a resume.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import torch

KINDS = ("counter", "global")

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15


class Draws(Protocol):
    """Numbers in a sequence; `mark` says where in it they are, and `back` returns to that place."""

    def random(self) -> float:
        """From 0, below 1."""
        ...

    def uniform(self, low: float, high: float) -> float: ...

    def randint(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        ...

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        """float32 of mean 0 and standard deviation 1."""
        ...

    def mark(self) -> Any: ...  # noqa: ANN401, each kind has a type of its own

    def back(self, mark: Any) -> None: ...  # noqa: ANN401, what `mark` returns


class GlobalDraws:
    """Python's and torch's default generators, as `distdl.data.keyed.KeyedDataset` seeds them."""

    def random(self) -> float:
        return random.random()

    def uniform(self, low: float, high: float) -> float:
        return random.uniform(low, high)

    def randint(self, low: int, high: int) -> int:
        return random.randint(low, high)

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(*shape)

    def mark(self) -> object:
        return random.getstate()

    def back(self, mark: Any) -> None:  # noqa: ANN401, as the protocol has it
        random.setstate(mark)


class CounterDraws:
    """Number n is a hash of key and n (splitmix64, Steele et al. 2014,
    https://doi.org/10.1145/2714064.2660195), so threads can draw side by side.

    Args:
        key: Of 64 bits.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._count = 0

    def random(self) -> float:
        self._count += 1
        z = (self._key + self._count * STEP) & MASK
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        return ((z ^ z >> 31) >> 11) * 2.0**-53

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def randint(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low + 1))

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.randint(0, 2**53 - 1))
        return torch.randn(*shape, generator=generator)

    def mark(self) -> int:
        return self._count

    def back(self, mark: int) -> None:
        self._count = mark


GLOBAL = GlobalDraws()
