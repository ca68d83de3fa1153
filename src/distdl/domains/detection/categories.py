"""The categories of a data set: COCO's ids, which have gaps, and labels, which have none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Categories:
    """Label `n` is the category `ids[n - 1]`, called `names[n - 1]`; 0 is the background."""

    ids: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def numbered(cls, count: int) -> Categories:
        """Those of data that name none: the ids are the labels."""
        return cls(tuple(range(1, count + 1)), tuple(map(str, range(1, count + 1))))

    @cached_property
    def labels(self) -> dict[int, int]:
        """The label of each id."""
        return {identity: label for label, identity in enumerate(self.ids, 1)}

    def ids_of(self, labels: Sequence[int]) -> list[int]:
        return [self.ids[label - 1] for label in labels]

    def __len__(self) -> int:
        return len(self.ids)
