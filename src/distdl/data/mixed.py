"""Several data sets in one epoch of training, in given shares."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from distdl.data.encoded import EncodedData
from distdl.domains.record import Annotation
from distdl.util.errors import Problem

Array = np.ndarray[Any, Any]


class MixedSamples(EncodedData):
    """The samples of several sets, one after the other. As many as there are make an epoch of
    training, of which each set gives its share. The order is a pure function of (seed, epoch), so a
    resume goes on exactly.

    Each set is gone through again and again, in a new order each time, over the epochs: none of its
    samples is used more than once as often as another. A sample that an epoch uses several times
    has a number for each use, so that it is augmented in other ways: its index plus a multiple of
    the length.

    Args:
        parts: Of one domain, with the same classes.
        weights: Shares of the epoch; only their ratios matter.
    """

    def __init__(self, parts: Sequence[EncodedData], weights: Sequence[float]) -> None:
        super().__init__(parts[0].view)
        self.parts = parts
        self.domain = parts[0].domain
        self.classes = parts[0].classes
        self.sizes = [len(part) for part in parts]
        self.starts = np.cumsum([0, *self.sizes])
        self.counts = _shares(sum(self.sizes), weights)
        keys = [*(part.key for part in parts), *map(str, self.counts)]
        self.key = hashlib.sha256(" ".join(keys).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _part(self, index: int) -> tuple[EncodedData, int]:
        """The set of a sample, and its index there."""
        index %= len(self)
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.parts[number], index - int(self.starts[number])

    def read(self, index: int) -> bytes:
        part, at = self._part(index)
        return part.read(at)

    def annotation(self, index: int) -> Annotation:
        part, at = self._part(index)
        return part.annotation(at)

    def name(self, index: int) -> str:
        part, at = self._part(index)
        return part.name(at)

    def repair(self, index: int) -> bool:
        part, at = self._part(index)
        return part.repair(at)

    def known_whole(self, index: int) -> bool:
        part, at = self._part(index)
        return part.known_whole(at)

    def found_whole(self, index: int) -> None:
        part, at = self._part(index)
        part.found_whole(at)

    def for_thread(self, threads: int) -> MixedSamples:
        mixed = copy.copy(self)
        mixed.parts = [part.for_thread(threads) for part in self.parts]
        return mixed

    # The methods of `distdl.data.sampling.Ordered`.
    def order(self, seed: int, epoch: int) -> Array:
        """Sample indices int64 [N]."""
        chosen = [self._of_part(number, seed, epoch) for number in range(len(self.parts))]
        return _random(seed, epoch, len(self.parts)).permutation(np.concatenate(chosen))

    def reached(self, seed: int, epoch: int, start: int, order: Array) -> None:
        pass

    def _of_part(self, number: int, seed: int, epoch: int) -> Array:
        """What an epoch takes of a set: the next ones of its endless order."""
        size = self.sizes[number]
        begin = epoch * self.counts[number]
        end = begin + self.counts[number]
        taken = [np.empty(0, np.int64)]
        for turn in range(begin // size, -(-end // size)):
            whole = _random(seed, turn, number).permutation(size)
            some = whole[max(begin - turn * size, 0) : end - turn * size]
            again = (turn - begin // size) * len(self)
            taken.append(some.astype(np.int64) + int(self.starts[number]) + again)
        return np.concatenate(taken)


def weights(mix: Sequence[Mapping[str, Any]]) -> list[float]:
    """The shares of all sets of `data.mix`, of which the first is that of `data.root`."""
    others = [float(entry["weight"]) for entry in mix]
    return [1.0 - sum(others), *others]


def problems(node: Mapping[str, Any]) -> Iterable[Problem]:
    """Problems of `mix` of a data node; paths are relative to the node."""
    mix = node.get("mix") or ()
    usual = "'data.mix=[{root: /more/images, weight: 0.2}]'"
    if isinstance(mix, str) or not isinstance(mix, Sequence):
        yield Problem(
            "mix", what=f"is {mix!r}, not a list of sets", remedy=usual, code="wrong-type"
        )
        return
    right = 0
    for number, entry in enumerate(mix):
        path = f"mix[{number}]"
        if not isinstance(entry, Mapping) or entry.keys() != {"root", "weight"}:
            yield Problem(
                path,
                what="is not a mapping with root and weight alone",
                remedy=usual,
                code="wrong-type",
            )
        elif not isinstance(entry["root"], str):
            yield Problem(
                f"{path}.root",
                what=f"is {entry['root']!r}, not a folder or an address",
                remedy=usual,
                code="wrong-type",
            )
        elif type(entry["weight"]) not in (int, float) or not 0 < entry["weight"] < 1:
            yield Problem(
                f"{path}.weight",
                what=f"is {entry['weight']!r}, not a share of the epoch above 0 and below 1",
                remedy=usual,
                code="out-of-range",
            )
        else:
            right += 1
    if mix and right == len(mix) and weights(mix)[0] <= 0:
        yield Problem(
            "mix",
            what=f"the weights make {1 - weights(mix)[0]:g}, so nothing is left of data.root",
            remedy="weights that make less than 1",
            code="out-of-range",
        )
    for key, value in (("cache_gb", None), ("order", "shuffled")):
        if mix and node.get(key, value) != value:
            yield Problem(
                key,
                what="a mixture is shuffled as a whole, so each node holds all of its sets",
                remedy=f"data.{key}={'null' if value is None else value}",
                code="conflict",
            )


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in parts by weight; what rounding leaves over goes to the largest remainders."""
    exact = total * np.array(weights, np.float64) / sum(weights)
    counts = np.floor(exact).astype(np.int64)
    most = np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]
    counts[most] += 1
    return [int(count) for count in counts]


def _random(seed: int, turn: int, number: int) -> np.random.RandomState:
    """NumPy guarantees that its numbers never change
    (https://numpy.org/neps/nep-0019-rng-policy.html)."""
    parts = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, turn, number]
    return np.random.RandomState(np.array(parts, np.uint32))
